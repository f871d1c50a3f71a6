//go:build e2e

package neighbors_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
	"github.com/talos-ccm/talos-ccm/test/process"
	"github.com/talos-ccm/talos-ccm/test/product"
)

const (
	awsEnv = "TALOS_CCM_AWS"

	// withoutNodeController and withoutLifecycle are the settings in docs/guides/cloud-providers.md.
	withoutNodeController = "*,-cloud-node-controller"
	withoutLifecycle      = "*,-cloud-node-lifecycle"

	// excluded is the configuration in docs/guides/coexistence.md, for AWS.
	excluded = `
nodes:
  selector:
    - matchExpressions:
        - {key: platform, operator: NotIn, values: [aws]}
`
)

// bed is a cluster on AWS. No kubelet runs, and Nodes are not Ready unless a test changes it.
type bed struct {
	ctest.Suite

	ec2 *ec2
}

func newBed(t *testing.T) *bed {
	t.Helper()

	return &bed{Suite: ctest.Start(t, kube.Options{ControllerManager: kube.ControllerManager{Absent: true}}), ec2: startEC2(t)}
}

// launch adds an instance and its machine. Unlike on AWS, the name of the instance does not contain its address.
func (b *bed) launch(number int, spec talostest.MachineSpec) *talostest.Machine {
	b.Helper()

	spec.Platform = runtime.PlatformMetadataSpec{
		Platform: "aws", Region: region, Zone: zone, InstanceType: instanceType, InstanceID: instanceID(number), ProviderID: providerID(number),
		Hostname: privateDNSName(number),
	}
	m := b.Machine(spec)
	b.ec2.set(newInstance(number, m.Address().String()))

	return m
}

// startTalosCCM starts talos-ccm on a control-plane machine, number 1, with a value of TALOS_CCM_CONTROLLERS and a configuration
// file. It registers the Node.
func (b *bed) startTalosCCM(nodename, controllers, configuration string) {
	b.Helper()

	m := b.launch(1, talostest.MachineSpec{
		Nodename: nodename, Type: talosmachine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: string(b.Kube.Kubeconfig()),
	})
	document := runtime.ExtensionServiceConfigSpec{
		Files:       []runtime.ExtensionServiceConfigFile{{Content: configuration, MountPath: "/usr/local/etc/talos-ccm/config.yaml"}},
		Environment: []string{"TALOS_CCM_CONTROLLERS=" + controllers},
	}
	require.NoError(b, m.SetExtensionServiceDocument(b.Context(), "talos-ccm", document))

	executable := filepath.Join(b.TempDir(), "talos-ccm")
	require.NoError(b, builder.Executable("../../cmd/talos-ccm", executable))

	b.stopAtEnd(product.Service{
		Executable: executable, Dir: filepath.Join(b.Kube.LogDir(), "talos-ccm"), Socket: m.Socket(),
		Args: []string{"--secure-port=0", "--v=2"}, Env: document.Environment,
	}.Start())

	spec := ctest.NodeOf(m)
	spec.ControlPlane = true
	b.Register(spec)
}

// startAWS starts the cloud controller manager of AWS with a value of --controllers. It checks Nodes ten times as often as by
// default.
func (b *bed) startAWS(controllers string) {
	b.Helper()

	file := func(name string) string { return filepath.Join(b.Kube.LogDir(), name) }
	configuration := fmt.Sprintf("[Global]\nZone=%s\nVPC=vpc-1\nSubnetID=subnet-1\nKubernetesClusterID=test\n"+
		"[ServiceOverride \"1\"]\nService=EC2\nRegion=%[2]s\nURL=%[3]s\nSigningRegion=%[2]s\n", zone, region, b.ec2.url)

	require.NoError(b, os.WriteFile(file("aws.conf"), []byte(configuration), 0o600))
	require.NoError(b, os.WriteFile(file("aws.kubeconfig"), b.Kube.Kubeconfig(), 0o600))

	b.stopAtEnd(process.Start(process.Command{
		Name: "aws", Path: os.Getenv(awsEnv), Log: file("aws.log"),
		Args: []string{
			"--cloud-provider=aws", "--cloud-config=" + file("aws.conf"), "--kubeconfig=" + file("aws.kubeconfig"), "--controllers=" + controllers,
			"--configure-cloud-routes=false", "--secure-port=0", "--leader-elect=false", "--node-monitor-period=500ms",
			"--node-status-update-frequency=500ms", "--v=2",
		},
		Env: []string{"AWS_ACCESS_KEY_ID=test", "AWS_SECRET_ACCESS_KEY=test", "AWS_EC2_METADATA_DISABLED=true"},
	}))
}

func (b *bed) stopAtEnd(p *process.Process, err error) {
	b.Helper()

	require.NoError(b, err)
	b.Cleanup(func() {
		if b.Failed() {
			b.Log(p.LogTail())
		}

		p.Stop(context.Background())
	})
}

// awaitDeletion waits until a Node does not exist.
func (b *bed) awaitDeletion(nodename string) {
	b.Helper()
	ctest.EventuallyNoError(b, func(ctx context.Context) error {
		_, err := b.Client.CoreV1().Nodes().Get(ctx, nodename, metav1.GetOptions{})
		if err == nil {
			return fmt.Errorf("node %s exists", nodename)
		}

		return ctest.IgnoreNotFound(err)
	})
}

// awaitIdle waits until a Node stays the same while AWS checks the Nodes that are not Ready several times.
func (b *bed) awaitIdle(nodename string) {
	b.Helper()
	ctest.EventuallyNoError(b, func(ctx context.Context) error {
		before, requests := b.Node(nodename), b.ec2.count()

		ctest.Eventually(b, "AWS checks Nodes", func() bool { return b.ec2.count() >= requests+10 })

		// Without ctest.Ask, because a Node that was deleted fails the test.
		after, err := b.Client.CoreV1().Nodes().Get(ctx, nodename, metav1.GetOptions{})
		require.False(b, apierrors.IsNotFound(err), "node %s was deleted", nodename)

		if err == nil && after.ResourceVersion != before.ResourceVersion {
			err = errors.New("controllers still write to node " + nodename)
		}

		return err
	})
}

// isShutdown reports whether a Node has the shutdown taint.
func isShutdown(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == cloudproviderapi.TaintNodeShutdown })
}

// talos-ccm initializes Nodes, and AWS taints and deletes them.
func TestAWS_DeletesNodesThatTalosCCMInitializes(t *testing.T) {
	t.Parallel()

	b := newBed(t)
	// AWS finds an existing Node without the domain by its providerID, and a new Node with the domain also without.
	existing, added := hostname(1), privateDNSName(2)

	b.startTalosCCM(existing, withoutLifecycle, "")
	b.AwaitNode(existing, ctest.Initialized)
	b.startAWS(withoutNodeController)
	b.awaitIdle(existing)
	b.Register(ctest.NodeOf(b.launch(2, talostest.MachineSpec{Nodename: added})))

	n := b.AwaitNode(added, ctest.Initialized)
	assert.Equal(t, providerID(2), n.Spec.ProviderID)
	assert.NotContains(t, n.Labels, "topology.k8s.aws/zone-id")
	b.awaitIdle(added)

	b.ec2.setState(2, "stopped")
	b.AwaitNode(added, func(n *corev1.Node, asrt *assert.Assertions) { asrt.True(isShutdown(n)) })
	b.awaitIdle(added)

	b.ec2.setState(2, "running")
	b.SetReady(added, corev1.ConditionTrue)
	b.AwaitNode(added, func(n *corev1.Node, asrt *assert.Assertions) { asrt.False(isShutdown(n)) })
	b.awaitIdle(added)

	b.ec2.setState(2, "terminated")
	b.SetReady(added, corev1.ConditionUnknown)
	b.awaitDeletion(added)

	b.awaitIdle(existing)
	b.ec2.remove(1)
	b.awaitDeletion(existing)
}

// AWS initializes and deletes Nodes that talos-ccm excludes. talos-ccm approves their certificates.
func TestAWS_InitializesNodesThatTalosCCMExcludes(t *testing.T) {
	t.Parallel()

	b := newBed(t)
	controlPlane, worker := privateDNSName(1), privateDNSName(2)

	b.startTalosCCM(controlPlane, "*", excluded)
	b.startAWS("*")
	b.Register(ctest.NodeOf(b.launch(2, talostest.MachineSpec{Nodename: worker})))
	b.AwaitNode(controlPlane, ctest.Initialized)

	n := b.AwaitNode(worker, ctest.Initialized)
	assert.Equal(t, providerID(2), n.Spec.ProviderID)
	assert.Equal(t, zoneID, n.Labels["topology.k8s.aws/zone-id"])
	b.awaitIdle(worker)

	csr, err := b.Kube.RequestServingCertificate(t.Context(), worker, "", worker)
	require.NoError(t, err)
	ctest.Await(t, b.Client.CertificatesV1().CertificateSigningRequests(), ctest.Named(csr.Name), func(csr *certificatesv1.CertificateSigningRequest, asrt *assert.Assertions) {
		asrt.True(slices.ContainsFunc(csr.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
			return c.Type == certificatesv1.CertificateApproved
		}))
	})

	b.ec2.setState(2, "terminated")
	b.awaitDeletion(worker)
}

// AWS deletes Nodes that have no providerID and not the name of an instance of the cluster, as in
// docs/guides/cloud-providers.md.
func TestAWS_DeletesNodesThatItDoesNotFind(t *testing.T) {
	t.Parallel()

	b := newBed(t)

	for number := 2; number <= 4; number++ {
		b.ec2.set(newInstance(number, "10.0.0.1"))
	}

	foreign := newInstance(5, "10.0.0.1")
	foreign.Tag = ""
	b.ec2.set(foreign)

	kept := []kube.NodeSpec{
		{Name: privateDNSName(2)},
		{Name: instanceID(3)}, // with AWS's resource names
		{Name: "metal", ProviderID: "talos://metal/30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"},
	}
	deleted := []kube.NodeSpec{
		{Name: hostname(4)},
		{Name: privateDNSName(5)},
		{Name: "terminated", ProviderID: providerID(6)},
	}

	for _, spec := range slices.Concat(kept, deleted) {
		b.Register(spec)
	}

	b.startAWS(withoutNodeController)

	for _, spec := range deleted {
		b.awaitDeletion(spec.Name)
	}

	for _, spec := range kept {
		b.awaitIdle(spec.Name)
	}
}
