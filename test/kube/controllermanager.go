package kube

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

const controllerManager = "kube-controller-manager"

// ControllerManager says what kube-controller-manager does.
//
// By default it runs only the controllers that a cloud controller manager depends on: those that sign and clean up
// CertificateSigningRequests and approve those of client certificates, make service accounts and their tokens, publish the root CA, aggregate cluster roles, and delete what was in
// a deleted namespace. Left out, on purpose, are node-lifecycle-controller and taint-eviction-controller, which would taint as unreachable
// every Node without a living kubelet 50 seconds after its registration; node-ipam-controller, unless PodCIDRs asks for it;
// garbage-collector-controller, which watches every resource there is; and all that runs workloads.
type ControllerManager struct {
	// Absent leaves kube-controller-manager out: CertificateSigningRequests are not signed, service accounts not made.
	Absent bool
	// Controllers are run besides the default ones, by upstream's names, such as node-lifecycle-controller.
	Controllers []string
	// PodCIDRs, if any, makes node-ipam-controller give each Node a block of each, as Talos has it by default.
	PodCIDRs []netip.Prefix
	// Flags are appended to the flags, where a later flag overrides an earlier one.
	Flags []string
}

func (m ControllerManager) controllers() []string {
	all := slices.Concat([]string{
		"certificatesigningrequest-approving-controller", // which approves nothing before [Cluster.BootstrapToken]
		"certificatesigningrequest-signing-controller",
		"certificatesigningrequest-cleaner-controller",
		"serviceaccount-controller",
		"serviceaccount-token-controller",
		"root-ca-certificate-publisher-controller",
		"clusterrole-aggregation-controller",
		"namespace-controller",
	}, m.Controllers)

	if len(m.PodCIDRs) > 0 {
		all = append(all, "node-ipam-controller")
	}

	return all
}

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

	if err := c.writeControllerManagerConfig(); err != nil {
		return err
	}

	process, err := c.startProcess(controllerManager, c.controllerManagerFlags())
	if err != nil {
		return err
	}

	if err := process.WaitReady(ctx, c.controllersRun); err != nil {
		process.Stop(ctx)

		return err
	}

	c.controllerManager = process

	return nil
}

// reviveControllerManager starts it again if it has ended by itself.
func (c *Cluster) reviveControllerManager(ctx context.Context) error {
	if c.controllerManager == nil || c.controllerManager.Ended() == nil {
		return nil
	}

	return c.startControllerManager(ctx)
}

func (c *Cluster) writeControllerManagerConfig() error {
	// An administrator, since without --use-service-account-credentials all controllers share this identity. With it, each of them waits
	// for a token before any of them starts, which takes seconds.
	pair, err := c.pki.clients.issue(subject{name: "system:" + controllerManager, groups: []string{groupMasters}})
	if err != nil {
		return err
	}

	if err := writeFile(c.folder.path(managerConfigFile), Kubeconfig(c.config(pair))); err != nil {
		return fmt.Errorf("start %s: %w", controllerManager, err)
	}

	return nil
}

func (c *Cluster) controllerManagerFlags() []string {
	file := c.folder.path
	options := c.options.ControllerManager
	flags := []string{
		"--kubeconfig=" + file(managerConfigFile),
		"--authentication-kubeconfig=" + file(managerConfigFile),
		"--authorization-kubeconfig=" + file(managerConfigFile),
		"--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", c.ports.controllerManager.Number()),
		"--permit-port-sharing",
		"--cert-dir=" + file("controller-manager-certs"),
		// There is only one, and a lease would have to expire before the next one starts.
		"--leader-elect=false",
		"--service-account-private-key-file=" + file(signingKeyFile),
		"--root-ca-file=" + file(servingCAFile),
		"--cluster-signing-cert-file=" + file(clientCAFile),
		"--cluster-signing-key-file=" + file(clientCAKeyFile),
		"--cluster-signing-duration=24h",
		"--controllers=" + strings.Join(options.controllers(), ","),
		// The default is a folder of the machine that this user may not be allowed to make.
		"--flex-volume-plugin-dir=" + file("flex-volumes"),
	}

	if len(options.PodCIDRs) > 0 {
		flags = append(flags, "--allocate-node-cidrs", "--cluster-cidr="+joinPrefixes(options.PodCIDRs))
	}

	return append(flags, options.Flags...)
}

func joinPrefixes(prefixes []netip.Prefix) string {
	texts := make([]string, len(prefixes))
	for i, prefix := range prefixes {
		texts[i] = prefix.String()
	}

	return strings.Join(texts, ",")
}

// controllersRun succeeds once the controllers are built: only then does the health report name them, and before that
// kube-controller-manager reports good health, yet ends itself when the API server goes away.
func (c *Cluster) controllersRun(ctx context.Context) error {
	url := "https://" + c.ports.controllerManager.Address() + "/healthz?verbose"

	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}

	response, err := (&http.Client{Transport: &http.Transport{
		// The component signs its certificate itself, and its answer proves nothing but that it serves.
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
		DisableKeepAlives: true,
	}}).Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close() //nolint:errcheck // only read

	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}

	if response.StatusCode != http.StatusOK || !strings.Contains(string(body), "-controller ok") {
		return fmt.Errorf("GET %s: %s: %s", url, response.Status, strings.TrimSpace(string(body)))
	}

	return nil
}
