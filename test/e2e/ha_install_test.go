//go:build e2e && ha

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/status"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// installPage is the path of the guide with the patch that TestHA_Installation applies.
const installPage = "../../docs/guides/install.md"

// TestHA_Installation installs talos-ccm on a cluster without a cloud controller manager, as in the guide. It replaces the bed.
// Kubelets request serving certificates from the beginning, so that requests are pending when talos-ccm starts.
func TestHA_Installation(t *testing.T) {
	require.NoError(t, errors.Join(bed.Down(), checkNoLeftovers(bed.ID())))
	require.NoError(t, bringUp(t.Context(), talos.Options{WithoutCloudProvider: true}))

	eventually(t, checkControlPlane)

	for _, m := range bed.ControlPlanes {
		patchMachine(t, m, "no-reboot", haDocument)
	}

	s := newStory(t)
	first := bed.ControlPlanes[0]
	added, remove := s.addWorker()

	require.NoError(t, first.Install(extensionDir(version)))
	require.NoError(t, first.Reboot(t.Context()))
	s.measure("1. extension on "+first.Name(), append(added,
		goal{"lease", checkLeaseRenewed}, goal{"all Nodes", checkNodesInitialized}, goal{"all certificates", checkKubelets}, goal{"healthy", checkControlPlane})...)
	remove()

	s.enableCloudProvider()

	for i, m := range bed.ControlPlanes[1:] {
		s.upgrade(m, version, fmt.Sprintf("203.0.113.%d/32", 70+i))
	}

	require.Equal(t, first, s.leader(), "the leader has changed")
	eventually(t, checkHealthy)

	// Without a CNI, no Node is ready, which the report contains.
	report := s.status()
	assert.Equal(t, first.Name(), report.Leader.Node, "leader")
	assert.Equal(t, status.Nodes{Talos: 4, Managed: 4}, report.Nodes)

	for _, i := range report.Instances {
		assert.Equal(t, version, i.Version, i.Node)
	}

	s.end()
}

// enableCloudProvider applies the guide's patch to all machines and to those that are added later. It requires that kubelets
// restart, and that a new Node waits for talos-ccm.
func (s *story) enableCloudProvider() {
	s.Helper()

	patch := yamlBlocks(s.T, installPage, "2. Enable the external cloud provider")[0]

	for _, m := range bed.Machines() {
		patchMachine(s.T, m, "no-reboot", patch)
	}

	require.NoError(s, bed.Patch(patch))

	added, remove := s.addWorker()
	s.measure("2. patch of all kubelets", append(added, goal{"all kubelets", func(ctx context.Context) error {
		for _, m := range bed.Machines() {
			// Kubelets set this annotation only with an external cloud provider.
			if node, err := getNode(ctx, m.Name()); err != nil || node.Annotations[cloudproviderapi.AnnotationAlphaProvidedIPAddr] == "" {
				return fmt.Errorf("the kubelet of %s has not restarted (%v)", m.Name(), err) //nolint:errorlint // may be nil
			}
		}

		return checkKubelets(ctx)
	}}, goal{"healthy", checkControlPlane})...)
	remove()
}

// checkKubelets returns an error unless all kubelets are healthy and have certificates.
func checkKubelets(ctx context.Context) (err error) {
	for _, m := range bed.Machines() {
		err = errors.Join(err, checkKubelet(ctx, m, m.Address()))
	}

	return err
}
