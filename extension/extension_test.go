package extension_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/blang/semver/v4"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/siderolabs/talos/pkg/machinery/extensions/services"
	"go.yaml.in/yaml/v4"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/talos-ccm/talos-ccm/extension"
)

const (
	name = "talos-ccm"
	root = ".."
)

// spec decodes the service spec as Talos does, but refuses what Talos would ignore.
func spec(t *testing.T) services.Spec {
	t.Helper()

	var s services.Spec

	decoder := yaml.NewDecoder(bytes.NewReader(extension.Spec))
	decoder.KnownFields(true)

	if err := decoder.Decode(&s); err != nil {
		t.Fatal(err)
	}

	return s
}

func TestTalosAcceptsTheServiceSpec(t *testing.T) {
	s := spec(t)
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}

	if s.Name != name {
		t.Errorf("name %q, want that of the file and of the container's folder, %q", s.Name, name)
	}

	if s.Container.Entrypoint != "./"+name {
		t.Errorf("entrypoint %q, want ./%s", s.Container.Entrypoint, name)
	}

	if s.Restart != services.RestartAlways {
		t.Errorf("restart %s: after a lost lease nobody would start it again", s.Restart)
	}
}

// Talos's boot waits for every extension service, and ends in a reboot if one never starts: see the comment in the spec.
func TestTheServiceDependsOnTheSocketAlone(t *testing.T) {
	want := []services.Dependency{{Path: constants.MachineSocketPath}}

	got := spec(t).Depends
	if len(got) != 1 || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("depends on %+v, want %+v", got, want)
	}

	if file := spec(t).Container.EnvironmentFile; file != "" {
		t.Errorf("waits for environment file %s", file)
	}
}

func TestTheContainerSeesTheSocketsFolderAndNothingElse(t *testing.T) {
	folder := filepath.Dir(constants.MachineSocketPath)
	want := []specs.Mount{{Source: folder, Destination: folder, Type: "bind", Options: []string{"rbind", "ro"}}}

	if got := spec(t).Container.Mounts; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("mounts %+v, want %+v", got, want)
	}

	if got := spec(t).Container.Security; fmt.Sprint(got) != fmt.Sprint(services.Security{}) {
		t.Errorf("security %+v, want Talos's defaults", got)
	}
}

func TestTheServiceDropsItsPrivileges(t *testing.T) {
	args := spec(t).Container.Args

	for _, want := range []string{"--drop-privileges", "--machine-socket=" + constants.MachineSocketPath, "--bind-address=127.0.0.1"} {
		if !slices.Contains(args, want) {
			t.Errorf("arguments %q lack %s", args, want)
		}
	}
}

// image lays out the extension's image; the binary is an empty file.
func image(t *testing.T) string {
	t.Helper()

	folder := t.TempDir()

	manifest, err := os.ReadFile(filepath.Join(root, "manifest.yaml"))
	if err != nil {
		t.Fatal(err)
	}

	for path, file := range map[string]struct {
		content []byte
		mode    os.FileMode
	}{
		"manifest.yaml": {manifest, 0o644},
		"rootfs/usr/local/etc/containers/talos-ccm.yaml":      {extension.Spec, 0o644},
		"rootfs/usr/local/lib/containers/talos-ccm/talos-ccm": {nil, 0o755},
	} {
		path = filepath.Join(folder, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}

		if err := os.WriteFile(path, file.content, file.mode); err != nil {
			t.Fatal(err)
		}
	}

	return folder
}

func load(t *testing.T) *extensions.Extension {
	t.Helper()

	loaded, err := extensions.Load(image(t))
	if err != nil {
		t.Fatal(err)
	}

	return loaded
}

func TestTalosLoadsTheImageFromVersion110On(t *testing.T) {
	for version, accepted := range map[string]bool{
		"1.9.6":          false,
		"1.10.0":         true,
		"1.10.0-alpha.1": true, // only x.y.z is compared
		"1.13.5":         true,
		"1.14.0-rc.1":    true,
		"2.0.0":          true, // a lower bound only
	} {
		t.Run(version, func(t *testing.T) {
			talos := semver.MustParse(version)

			err := load(t).Validate(extensions.WithValidateConstraints(), extensions.WithValidateContents(), extensions.WithTalosVersion(&talos))
			if (err == nil) != accepted {
				t.Errorf("accepted %t, want %t (%v)", err == nil, accepted, err)
			}
		})
	}
}

func TestTheManifestSaysWhatItIs(t *testing.T) {
	metadata := load(t).Manifest.Metadata

	if metadata.Name != name {
		t.Errorf("name %q, want %q", metadata.Name, name)
	}

	if metadata.Author == "" || metadata.Description == "" {
		t.Error("author or description is missing")
	}

	// Talos labels Nodes with it: no "v", and no +build, which is no label value.
	if version := regexp.MustCompile(`^\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`); !version.MatchString(metadata.Version) {
		t.Errorf("version %q is not x.y.z or x.y.z-pre", metadata.Version)
	}
}

func TestTheManifestAndTheBuildAgreeOnTheVersion(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(root, "vars.yaml"))
	if err != nil {
		t.Fatal(err)
	}

	var vars map[string]string
	if err := yaml.Unmarshal(content, &vars); err != nil {
		t.Fatal(err)
	}

	if got, want := vars["VERSION"], load(t).Manifest.Metadata.Version; got != want {
		t.Errorf("vars.yaml says %q, manifest.yaml %q", got, want)
	}
}

// objects are those of the RBAC manifest, decoded as strictly as the API server does on request.
func objects(t *testing.T) []runtime.Object {
	t.Helper()

	var (
		list    []runtime.Object
		decoder = serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
		reader  = utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(extension.RBAC)))
	)

	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return list
		}

		if err != nil {
			t.Fatal(err)
		}

		object, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}

		list = append(list, object)
	}
}

// permissions says each rule in a line: what, on which names, may be done.
func permissions(rules []rbacv1.PolicyRule) []string {
	var lines []string

	for _, rule := range rules {
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				what := strings.TrimPrefix(group+"/"+resource, "/")
				if len(rule.ResourceNames) > 0 {
					what += " " + strings.Join(rule.ResourceNames, ",")
				}

				lines = append(lines, what+": "+strings.Join(rule.Verbs, " "))
			}
		}
	}

	slices.Sort(lines)

	return lines
}

// Whatever is added here is one thing more that a stolen token could do.
func TestTheServiceAccountMayDoExactlyThis(t *testing.T) {
	want := map[string][]string{
		"ClusterRole /system:talos-ccm": {
			"nodes/status: patch",
			"nodes: list watch patch",
		},
		"Role default/system:talos-ccm": {
			"events: create patch",
		},
		"Role kube-system/system:talos-ccm": {
			"coordination.k8s.io/leases cloud-controller-manager-talos: get update",
			"coordination.k8s.io/leases: create",
			"events: create patch",
		},
	}

	for _, object := range objects(t) {
		var (
			id    string
			rules []rbacv1.PolicyRule
		)

		switch o := object.(type) {
		case *rbacv1.ClusterRole:
			id, rules = "ClusterRole /"+o.Name, o.Rules
		case *rbacv1.Role:
			id, rules = "Role "+o.Namespace+"/"+o.Name, o.Rules
		default:
			continue
		}

		if got := permissions(rules); !slices.Equal(got, want[id]) {
			t.Errorf("%s allows\n  %s\nwant\n  %s", id, strings.Join(got, "\n  "), strings.Join(want[id], "\n  "))
		}

		delete(want, id)
	}

	for id := range want {
		t.Errorf("%s is missing", id)
	}
}

func TestTheRolesAreBoundToTheServiceAccountAlone(t *testing.T) {
	want := []string{
		"/system:talos-ccm → ClusterRole system:talos-ccm",
		"/system:talos-ccm:auth-delegator → ClusterRole system:auth-delegator",
		"default/system:talos-ccm → Role system:talos-ccm",
		"kube-system/system:talos-ccm → Role system:talos-ccm",
		"kube-system/system:talos-ccm:authentication-reader → Role extension-apiserver-authentication-reader",
	}

	account := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: extension.ServiceAccount, Namespace: extension.Namespace}}

	var got []string

	bound := func(id string, subjects []rbacv1.Subject, ref rbacv1.RoleRef) {
		got = append(got, fmt.Sprintf("%s → %s %s", id, ref.Kind, ref.Name))

		if !slices.Equal(subjects, account) {
			t.Errorf("%s binds %v, want %v", id, subjects, account)
		}
	}

	for _, object := range objects(t) {
		switch o := object.(type) {
		case *rbacv1.ClusterRoleBinding:
			bound("/"+o.Name, o.Subjects, o.RoleRef)
		case *rbacv1.RoleBinding:
			bound(o.Namespace+"/"+o.Name, o.Subjects, o.RoleRef)
		}
	}

	slices.Sort(got)

	if !slices.Equal(got, want) {
		t.Errorf("bindings\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

func TestPodsCannotMountTheServiceAccount(t *testing.T) {
	for _, object := range objects(t) {
		account, ok := object.(*corev1.ServiceAccount)
		if !ok {
			continue
		}

		if account.Name != extension.ServiceAccount || account.Namespace != extension.Namespace {
			t.Errorf("service account %s/%s, want %s/%s", account.Namespace, account.Name, extension.Namespace, extension.ServiceAccount)
		}

		if account.AutomountServiceAccountToken == nil || *account.AutomountServiceAccountToken {
			t.Error("its token would be mounted into pods")
		}

		return
	}

	t.Error("there is no service account")
}
