package kube

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"strings"

	"github.com/siderolabs/gen/xslices"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
)

const controllerManager = "kube-controller-manager"

// ControllerManager says what kube-controller-manager does.
//
// By default it runs only the controllers that a cloud controller manager depends on: those that sign and clean up
// CertificateSigningRequests and approve those of client certificates, make service accounts and their tokens, publish
// the root CA, aggregate cluster roles, and delete what was in a deleted namespace. Left out, on purpose, are
// node-lifecycle-controller and taint-eviction-controller, which would taint as unreachable every Node without a living
// kubelet 50 seconds after its registration; node-ipam-controller, unless PodCIDRs asks for it;
// garbage-collector-controller, which watches every resource there is; and all that runs workloads.
type ControllerManager struct {
	// Absent leaves kube-controller-manager out: CertificateSigningRequests are not signed, service accounts not made.
	Absent bool
	// PodCIDRs, if any, makes node-ipam-controller give each Node a block of each, as Talos has it by default.
	PodCIDRs []netip.Prefix
	// Flags are appended to the flags, where a later flag overrides an earlier one.
	Flags []string
}

// controllers are the default ones, by upstream's names. The first approves nothing before [Cluster.BootstrapToken].
const controllers = "certificatesigningrequest-approving-controller,certificatesigningrequest-signing-controller," +
	"certificatesigningrequest-cleaner-controller,serviceaccount-controller,serviceaccount-token-controller," +
	"root-ca-certificate-publisher-controller,clusterrole-aggregation-controller,namespace-controller"

// StartControllerManager starts kube-controller-manager in a cluster from which it is [ControllerManager.Absent].
func (c *Cluster) StartControllerManager(ctx context.Context, options ControllerManager) error {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.options.ControllerManager = options

	return c.startControllerManager(ctx)
}

func (c *Cluster) startControllerManager(ctx context.Context) error {
	if c.options.ControllerManager.Absent {
		return nil
	}

	// All controllers share the identity of an administrator. With --use-service-account-credentials, each of them waits
	// for a token before any of them starts, which takes seconds.
	err := c.directory.write(managerConfigFile, Kubeconfig(c.config(c.pki.admin)))
	if err == nil {
		c.controllerManager, err = startReady(ctx, c.command(controllerManager, c.controllerManagerFlags()), c.controllersRun)
	}

	return err
}

func (c *Cluster) controllerManagerFlags() []string {
	file := c.directory.path
	options := c.options.ControllerManager
	flags := []string{
		"--kubeconfig=" + file(managerConfigFile),
		"--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", c.ports[controllerManagerPort].Number()),
		"--permit-port-sharing",
		"--cert-dir=" + file("controller-manager-certs"),
		// There is only one, and a lease would have to expire before the next one starts.
		"--leader-elect=false",
		"--service-account-private-key-file=" + file(signingKeyFile),
		"--root-ca-file=" + file(servingCAFile),
		"--cluster-signing-cert-file=" + file(clientCAFile),
		"--cluster-signing-key-file=" + file(clientCAKeyFile),
		"--cluster-signing-duration=24h",
		"--controllers=" + controllers,
		// The default is a directory of the machine that this user may not be allowed to create.
		"--flex-volume-plugin-dir=" + file("flex-volumes"),
	}

	if len(options.PodCIDRs) > 0 {
		cidrs := strings.Join(xslices.Map(options.PodCIDRs, netip.Prefix.String), ",")
		flags = append(flags, "--controllers=node-ipam-controller", "--allocate-node-cidrs", "--cluster-cidr="+cidrs)
	}

	return append(flags, options.Flags...)
}

// controllersRun succeeds once the controllers are built: only then does the health report name them, and before that
// kube-controller-manager reports good health, yet ends itself when the API server goes away.
func (c *Cluster) controllersRun(ctx context.Context) error {
	client, err := discovery.NewDiscoveryClientForConfig(&rest.Config{
		Host: "https://" + c.ports[controllerManagerPort].Address(),
		// The component signs its certificate itself, and its answer proves nothing but that it serves.
		TLSClientConfig: rest.TLSClientConfig{Insecure: true},
	})
	if err != nil {
		return err
	}

	health, err := client.RESTClient().Get().AbsPath("/healthz").Param("verbose", "").DoRaw(ctx)
	if err == nil && !bytes.Contains(health, []byte("-controller ok")) {
		err = fmt.Errorf("no controller runs yet: %s", health)
	}

	return err
}
