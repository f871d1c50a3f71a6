package docs_test

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	rbacv1 "k8s.io/api/rbac/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/talos-ccm/talos-ccm/extension"
)

// grants returns the permissions and bound Kubernetes roles of the manifest that have the given controller as label, in
// the format of the page.
func grants(t *testing.T, controller string) (rights, roles []string) {
	t.Helper()

	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(extension.RBAC)))

	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return rights, roles
		}

		require.NoError(t, err)

		// Roles and bindings share only the metadata.
		var object struct {
			rbacv1.ClusterRole `json:",inline"`

			RoleRef rbacv1.RoleRef `json:"roleRef"`
		}

		require.NoError(t, yaml.Unmarshal(document, &object))

		if object.Labels[extension.ControllerLabel] != controller {
			continue
		}

		where := cmp.Or(object.Namespace, "cluster")

		if name := object.RoleRef.Name; name != "" && !strings.HasPrefix(name, "system:talos-ccm") {
			roles = append(roles, where+" "+name)
		}

		for _, rule := range object.Rules {
			rights = append(rights, lines(where, rule)...)
		}
	}
}

func lines(where string, rule rbacv1.PolicyRule) (list []string) {
	for _, group := range rule.APIGroups {
		for _, resource := range rule.Resources {
			list = append(list, strings.Join([]string{
				where, strings.TrimPrefix(group+"/"+resource, "/"), strings.Join(rule.ResourceNames, ", "), strings.Join(rule.Verbs, ", "),
			}, " | "))
		}
	}

	return list
}

func TestPermissions_MatchManifest(t *testing.T) {
	for controller, heading := range map[string]string{
		"":                                "Permissions",
		"cloud-node-lifecycle-controller": "Permissions of cloud-node-lifecycle-controller",
		"service-lb-controller":           "Permissions of service-lb-controller",
		extension.SecurePort:              "Permissions for the secure port",
	} {
		var gotRights, gotRoles []string

		for _, cells := range rows(t, "docs/reference/rbac.md", heading) {
			for i := range cells {
				cells[i] = strings.ReplaceAll(cells[i], "`", "")
			}

			if len(cells) == 4 {
				gotRights = append(gotRights, strings.Join(cells, " | "))
			} else {
				gotRoles = append(gotRoles, cells[1]+" "+cells[0])
			}
		}

		rights, roles := grants(t, controller)

		assert.ElementsMatch(t, rights, gotRights, heading)
		assert.ElementsMatch(t, roles, gotRoles, heading)
		assert.NotZero(t, len(rights)+len(roles), "%s: the manifest was not read", heading)
	}
}
