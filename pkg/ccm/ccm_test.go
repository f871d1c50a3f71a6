package ccm_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

func TestManager_InitializesNodesOverMachineSocket(t *testing.T) {
	s, self, worker := newCluster(t)

	r := s.start(s.options(self))
	s.awaitInitialized(self, worker)
	s.move(self, "self-moved")
	s.move(worker, "worker-moved")

	// The local machine is read only over machine.sock.
	assert.Equal(t, 0, self.Connections())

	assert.NotEmpty(t, s.holder())

	r.stop()

	assert.Empty(t, s.holder())
}

// outside returns options for an instance outside Talos.
func (s *suite) outside(on *talostest.Machine) *ccm.Options {
	s.Helper()

	talosconfig, err := s.Talos.Talosconfig(string(role.Reader))
	require.NoError(s, err)

	options := s.options(on)
	options.MachineSocket, options.RunDir = "", ""
	options.Talosconfig = filepath.Join(s.TempDir(), "talosconfig")
	options.Framework.Generic.ClientConnection.Kubeconfig = filepath.Join(s.TempDir(), "kubeconfig")

	require.NoError(s, talosconfig.Save(options.Talosconfig))
	require.NoError(s, os.WriteFile(options.Framework.Generic.ClientConnection.Kubeconfig, s.Kube.Kubeconfig(), 0o600))

	return options
}

func TestManager_RunsOutsideTalosWithReaderRole(t *testing.T) {
	s, self, worker := newCluster(t)
	s.start(s.outside(self))
	s.awaitInitialized(self, worker)
	s.move(worker, "moved")

	for _, call := range slices.Concat(self.Calls(), worker.Calls()) {
		assert.Equal(t, []string{string(role.Reader)}, call.Roles)
		assert.Equal(t, talostest.TransportAPID, call.Transport)
	}
}

// longLease sets a lease duration that outlasts any restart of the API server.
func longLease(options *ccm.Options) {
	election := &options.Framework.Generic.LeaderElection
	election.LeaseDuration.Duration, election.RenewDeadline.Duration = 10*time.Minute, 9*time.Minute
}

// stopAPIServer stops the API server and restarts it when the test ends.
func (s *suite) stopAPIServer() {
	s.Helper()

	s.Kube.StopAPIServer(s.Context())
	s.Cleanup(func() { require.NoError(s, s.Kube.StartAPIServer(context.Background())) })
}

// initializing registers the Nodes of 30 machines, some of them slow, and returns when some but not all are
// initialized: the last one is frozen.
func (s *suite) initializing() (machines []*talostest.Machine, last *talostest.Machine) {
	s.Helper()

	for i := range 30 {
		last = s.worker(fmt.Sprintf("worker-%d", i))
		last.SlowDown(time.Duration(i) * 100 * time.Millisecond)
		machines = append(machines, last)
	}

	last.Freeze()
	s.register(machines...)
	s.awaitInitialized(machines[:5]...)

	s.assertUninitialized(last)

	return machines, last
}

func TestManager_SurvivesAPIServerRestart(t *testing.T) {
	s := newSuite(t)
	options := s.options(s.controlPlane("cp"))
	longLease(options)

	r := s.start(options)
	machines, last := s.initializing()

	s.stopAPIServer()
	last.Thaw()
	require.NoError(s, s.Kube.StartAPIServer(t.Context()))

	s.awaitInitialized(machines...)
	r.alive()
	s.move(machines[7], "moved")
}

func TestManager_ExitsWhenLeaseExpiresDuringAPIServerOutage(t *testing.T) {
	s := newSuite(t)
	options := s.options(s.controlPlane("cp"))
	election := &options.Framework.Generic.LeaderElection
	election.LeaseDuration.Duration, election.RenewDeadline.Duration, election.RetryPeriod.Duration = 8*time.Second, 6*time.Second, time.Second

	r := s.launch(options)
	machines, last := s.initializing()

	s.stopAPIServer()

	ctest.Receive(s, r.ended, "talos-ccm ends")

	assert.NotNil(t, r.err)

	// Talos restarts the service immediately, whether the API server is available or not.
	longLease(options)

	again := s.start(options)

	last.Thaw()
	require.NoError(s, s.Kube.StartAPIServer(t.Context()))
	s.awaitInitialized(machines...)
	again.alive()
}

func TestManager_WaitsForAPIServer(t *testing.T) {
	s, self, worker := newCluster(t)
	s.stopAPIServer()

	r := s.start(s.options(self))
	ctest.Eventually(s, "admin kubeconfig is read again", func() bool {
		return calls(self, "/cosi.resource.State/Get", "KubernetesSecrets.secrets.talos.dev") >= 2
	})
	r.alive()

	require.NoError(s, s.Kube.StartAPIServer(t.Context()))
	s.awaitInitialized(self, worker)
}

// calls returns the number of calls over machine.sock for a resource type, which is empty for calls without one.
func calls(m *talostest.Machine, method string, resourceType resource.Type) int {
	n := 0

	for _, call := range m.Calls() {
		if call.Transport == talostest.TransportSocket && call.Method == method && call.ResourceType == resourceType {
			n++
		}
	}

	return n
}

func TestManager_WaitsForAdminKubeconfig(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp", func(spec *talostest.MachineSpec) { spec.LocalhostAdminKubeconfig = "" })
	s.register(self)

	r := s.start(s.options(self))
	ctest.Eventually(s, "admin kubeconfig is read", func() bool {
		return calls(self, "/cosi.resource.State/Get", "KubernetesSecrets.secrets.talos.dev") >= 1
	})
	r.alive()

	require.NoError(s, self.SetLocalhostAdminKubeconfig(t.Context(), s.Kube.Kubeconfig()))
	s.awaitInitialized(self)
}

func TestManager_InitializesOthersWithoutLocalMetadata(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp", func(spec *talostest.MachineSpec) { spec.PlatformPending = true })
	worker := s.worker("worker")
	s.register(self, worker)

	s.start(s.options(self))
	s.awaitInitialized(worker)

	s.assertUninitialized(self)

	require.NoError(s, self.ResolvePlatform(t.Context()))
	s.awaitInitialized(self)
}

func TestManager_InitializesLocalNodeWithoutNetwork(t *testing.T) {
	s, self, worker := newCluster(t)
	require.NoError(s, worker.Stop(t.Context()))

	s.start(s.options(self))
	s.awaitInitialized(self)
	s.AwaitEvent(worker.Nodename(), nodecontroller.ReasonUnreachable)

	s.assertUninitialized(worker)

	worker.Start()
	s.awaitInitialized(worker)
}

// A kubelet writes the addresses of its Node, and reports of control-plane machines affect the whole cluster.
func TestManager_DialsControlPlaneAtKnownAddresses(t *testing.T) {
	s := newSuite(t)
	self, other := s.controlPlane("cp-1"), s.controlPlane("cp-2")
	s.register(self, other)

	for _, m := range []*talostest.Machine{self, other} {
		s.labelControlPlane(m)
	}

	s.start(s.options(self))
	s.awaitInitialized(self) // over its socket
	s.AwaitEvent(other.Nodename(), nodecontroller.ReasonUnreachable)

	assert.Empty(t, other.Calls())

	s.Talos.SetEtcdMembers(self.Address(), other.Address())
	s.awaitInitialized(other)
}

// The API server derives the field manager from the user agent. The default of client-go is the name of the binary,
// here the test binary.
func TestManager_SetsFieldManager(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp")
	s.register(self)
	s.start(s.options(self))
	s.awaitInitialized(self)
	event := s.AwaitEvent(self.Nodename(), nodecontroller.ReasonInitialized)

	for _, entry := range slices.Concat(s.Node(self.Nodename()).ManagedFields, event.ManagedFields) {
		assert.NotEqual(t, filepath.Base(os.Args[0]), entry.Manager, entry.FieldsV1)
	}
}

// awaitIdle waits until the process logs that it idles at a new stage. It fails the test if the process has done more
// than watch the type and the status of its machine and its configuration.
func (p *process) awaitIdle(m *talostest.Machine, stage runtime.MachineStage) {
	p.suite.Helper()

	require.NoError(p.suite, m.SetStage(p.suite.Context(), stage))
	ctest.Eventually(p.suite, "talos-ccm logs that it idles", func() bool {
		return strings.Contains(p.output.String(), fmt.Sprintf(`; idling" controlPlane=false stage=%q`, stage))
	})

	allowed := []resource.Type{config.MachineTypeType, runtime.MachineStatusType, runtime.ExtensionServiceConfigType}

	var made []talostest.Call

	// The simulated machine records a stream before it has received the request.
	ctest.Eventually(p.suite, "all calls have a resource type", func() bool {
		made = m.Calls()

		return !slices.ContainsFunc(made, func(call talostest.Call) bool {
			return call.Open && call.ResourceType == "" && strings.HasPrefix(call.Method, "/cosi.resource.State/")
		})
	})

	for _, call := range made {
		assert.Contains(p.suite, allowed, call.ResourceType, "%s with roles %v", call.Method, call.Roles)
	}

	assert.Empty(p.suite, p.suite.holder())
}

func TestManager_IdlesOnWorker(t *testing.T) {
	s := newSuite(t)
	self := s.machine(talostest.MachineSpec{Nodename: "worker", ServeSocket: true})
	s.register(self)

	p := s.spawn(self)
	for _, stage := range []runtime.MachineStage{runtime.MachineStageBooting, runtime.MachineStageInstalling, runtime.MachineStageRunning} {
		p.awaitIdle(self, stage)
	}

	s.assertUninitialized(self)

	p.terminate()
}

func TestManager_IdlesInMaintenanceMode(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp")
	s.register(self)
	require.NoError(s, self.State().Destroy(t.Context(), config.NewMachineType().Metadata()))

	p := s.spawn(self)
	p.awaitIdle(self, runtime.MachineStageBooting)
	p.awaitIdle(self, runtime.MachineStageMaintenance)

	machineType := config.NewMachineType()
	machineType.SetMachineType(talosmachine.TypeControlPlane)
	require.NoError(s, self.State().Create(t.Context(), machineType))
	s.awaitInitialized(self)
	p.terminate()
}

func TestManager_ReleasesLeaseBeforeMachineGoesDown(t *testing.T) {
	for _, stage := range []runtime.MachineStage{
		runtime.MachineStageRebooting, runtime.MachineStageShuttingDown, runtime.MachineStageResetting, runtime.MachineStageUpgrading,
	} {
		t.Run(stage.String(), func(t *testing.T) {
			s, self, worker := newCluster(t)

			options := s.options(self)
			// talos-ccm binds the port again when the stage returns to running.
			options.Framework.SecureServing.BindPort, options.Framework.SecureServing.PermitPortSharing = reservedPort(t), true
			r := s.start(options)
			s.awaitInitialized(worker)

			began := time.Now()

			require.NoError(s, self.SetStage(t.Context(), stage))
			ctest.Eventually(s, "lease is released", func() bool { return s.holder() == "" })
			t.Logf("lease released after %s", time.Since(began))
			ctest.Eventually(s, "worker is no longer watched", func() bool { return worker.Connections() == 0 })
			r.alive()

			require.NoError(s, self.SetStage(t.Context(), runtime.MachineStageRunning))
			s.move(worker, "moved")
		})
	}
}

// reservedPort returns a port that is reserved until the test ends. Listeners must permit port sharing.
func reservedPort(t testing.TB) int {
	t.Helper()

	port, err := kube.ReservePort()
	require.NoError(t, err)
	t.Cleanup(port.Release)

	return port.Number()
}

// Only the state of the local machine determines whether talos-ccm runs, so a broken watch must be restarted.
func TestManager_RewatchesLocalMachine(t *testing.T) {
	s, self, worker := newCluster(t)

	r := s.start(s.options(self))
	s.awaitInitialized(self, worker)

	require.NoError(s, self.Stop(t.Context()))
	self.Start()
	s.move(self, "self-moved")
	s.move(worker, "worker-moved")
	r.alive()

	require.NoError(s, self.SetStage(t.Context(), runtime.MachineStageRebooting))
	ctest.Eventually(s, "lease is released", func() bool { return s.holder() == "" })
}

func TestManager_LogsThatSocketDoesNotRespond(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp")
	self.Freeze()

	options := s.options(self)
	clk := clocktesting.NewFakeClock(time.Now())
	options.Clock = clk

	logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	sink, _ := logger.GetSink().(ktesting.Underlier)
	logged := func(message string) int { return strings.Count(sink.GetBuffer().String(), message) }

	s.launchWith(klog.NewContext(t.Context(), logger), options)

	const failed, recovered = "Failed to watch local machine; retrying", "Watching local machine"

	stepUntil := func(what string, done func() bool) {
		ctest.Eventually(s, what, func() bool {
			clk.Step(time.Second)

			return done()
		})
	}

	stepUntil("the outage is logged", func() bool { return logged(failed) > 0 })

	calls := len(self.Calls())
	stepUntil("the watches are retried", func() bool { return len(self.Calls()) > calls+4 })
	self.Thaw()
	stepUntil("the recovery is logged", func() bool { return logged(recovered) > 1 })

	// One message for the machine type, and one for the document.
	assert.Equal(t, 2, logged(failed))
}

// passing advances a clock in real time until the test ends.
func passing(t *testing.T, clk *clocktesting.FakeClock) {
	t.Helper()

	const tick = 10 * time.Millisecond

	ticker, done := time.NewTicker(tick), make(chan struct{})
	t.Cleanup(func() { close(done); ticker.Stop() })

	go func() {
		for {
			select {
			case <-ticker.C:
				clk.Step(tick)
			case <-done:
				return
			}
		}
	}()
}

func TestManager_RenewsTalosCertificate(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now())
	passing(t, clk)

	// Not parallel, because it reads a metric of the process.
	s := prepared(beds.NewSerialSuite(t), talostest.Options{Clock: clk})
	self, worker := s.controlPlane("cp"), s.worker("worker")
	s.register(self, worker)

	options := s.options(self)
	options.Clock = clk
	// The API server uses the real clock, so its tokens would look expired.
	options.Framework.Generic.ClientConnection.Kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(s, os.WriteFile(options.Framework.Generic.ClientConnection.Kubeconfig, s.Kube.Kubeconfig(), 0o600))

	s.start(options)
	s.awaitInitialized(self, worker)

	// The metric changes when a new certificate is in use, not when it is requested.
	expiry := func() float64 { return ctest.Metrics(t)["talosccm_reader_certificate_expiry_timestamp_seconds"] }
	first := expiry()

	clk.Step(31 * time.Minute)
	ctest.Eventually(s, "second certificate is in use", func() bool { return expiry() >= first+30*60 })

	// The step may have ended watches. Wait until the worker is watched again before the next step.
	s.move(worker, "moved")

	// The first certificate has expired, and all sessions have ended.
	before := watches(worker)

	clk.Step(46 * time.Minute)
	ctest.Eventually(s, "worker is dialed again", func() bool { return watches(worker) > before })
	s.move(worker, "moved-again")

	assert.Empty(t, s.Events(worker.Nodename(), nodecontroller.ReasonUnreachable))
}

// watches returns the number of watches of the machine's metadata that were started over the network.
func watches(m *talostest.Machine) int {
	n := 0

	for _, call := range m.Calls() {
		if call.Transport == talostest.TransportAPID && call.ResourceType == runtime.PlatformMetadataType && call.Method == "/cosi.resource.State/Watch" {
			n++
		}
	}

	return n
}

func TestManager_FollowsAPIServerCARotation(t *testing.T) {
	s, self, worker := newCluster(t)

	options := s.options(self)
	longLease(options)

	r := s.start(options)
	s.awaitInitialized(self, worker)

	require.NoError(s, s.Kube.RotateServingCA(t.Context()))

	var err error

	s.Client, err = kubernetes.NewForConfig(s.Kube.Config())
	require.NoError(s, err)
	require.NoError(s, self.SetLocalhostAdminKubeconfig(t.Context(), s.Kube.Kubeconfig()))

	began := time.Now()

	s.move(worker, "moved")
	t.Logf("reconnected %s after the CA was rotated", time.Since(began))
	r.alive()
}

func TestOptions_ControllerNames(t *testing.T) {
	own := []string{
		"cloud-node-controller", "cloud-node-lifecycle-controller", "certificatesigningrequest-approving-controller",
		"node-ipam-controller", "service-lb-controller",
		"cloud-node", "cloud-node-lifecycle", "node-csr-approval", "nodeipam", "service",
	}
	// Users of other cloud controller managers may disable them.
	others := []string{"node-route-controller", "route"}
	unknown := []string{"cloud-nodes", "nodelifecycle"}

	for _, name := range slices.Concat(own, others, unknown) {
		for _, entry := range []string{name, "-" + name} {
			t.Run(entry, func(t *testing.T) {
				refused := strconv.Quote(name)
				if slices.Contains(own, name) || slices.Contains(others, name) && entry != name {
					refused = ""
				}

				options := withControllers(t, "*", entry)
				options.Framework.KubeCloudShared.AllocateNodeCIDRs = slices.Contains([]string{"nodeipam", "node-ipam-controller"}, entry)

				assertRefused(t, options.Validate(), refused, entry)
			})
		}
	}
}

// assertRefused fails unless the error of the input contains a text, or is nil if the text is empty.
func assertRefused(t *testing.T, err error, text string, input any) {
	t.Helper()

	if text == "" {
		assert.NoError(t, err, "%+v", input)
	} else {
		assert.ErrorContains(t, err, text, "%+v", input)
	}
}

// Invalid values are refused at startup, and therefore also in the environment of a document.
func TestOptions_HostedControlPlane(t *testing.T) {
	for _, test := range []struct {
		hosted, cluster, service, socket string
		refused                          string // part of the error; empty if valid
	}{
		{hosted: "api.example.org, 203.0.113.1,2001:db8::1", cluster: "10.244.0.0/16", service: "10.96.0.0/12"},
		{hosted: "api.example.org", cluster: "10.244.0.0/16", refused: "requires --cluster-cidr and --service-cluster-ip-range"},
		{hosted: "api.example.org", service: "10.96.0.0/12", refused: "requires --cluster-cidr and --service-cluster-ip-range"},
		{hosted: "api.example.org", cluster: "10.244.0.0/16", service: "10.96.0.0/12", socket: "/run/machine.sock", refused: "cannot be combined with --machine-socket"},
		{hosted: "https://api.example.org", cluster: "10.244.0.0/16", service: "10.96.0.0/12", refused: `is not a valid DNS name; write host names and addresses without scheme and port`},
		{hosted: "api.example.org:6443", cluster: "10.244.0.0/16", service: "10.96.0.0/12", refused: "without scheme and port"},
		{hosted: "[2001:db8::1]:6443", cluster: "10.244.0.0/16", service: "10.96.0.0/12", refused: "without scheme and port"},
		{hosted: "0.0.0.0", cluster: "10.244.0.0/16", service: "10.96.0.0/12", refused: `"0.0.0.0" is a loopback`},
		{hosted: "203.0.113.1,127.0.0.1", cluster: "10.244.0.0/16", service: "10.96.0.0/12", refused: `"127.0.0.1" is a loopback`},
		{hosted: "localhost", cluster: "10.244.0.0/16", service: "10.96.0.0/12", refused: `"localhost" is reserved for the cluster`},
		{hosted: "kubernetes.default.svc", cluster: "10.244.0.0/16", service: "10.96.0.0/12", refused: `"kubernetes.default.svc" is reserved for the cluster`},
		{hosted: "203.0.113.300", cluster: "10.244.0.0/16", service: "10.96.0.0/12", refused: `"203.0.113.300" can be parsed as an IP address`},
		{hosted: "api.example.org,", cluster: "10.244.0.0/16", service: "10.96.0.0/12", refused: `"" is not a valid DNS name`},
		{hosted: "*.example.org", cluster: "10.244.0.0/16", service: "10.96.0.0/12", refused: "is a wildcard"},
	} {
		options := withControllers(t, "*")
		options.HostedControlPlane = test.hosted
		options.Framework.KubeCloudShared.ClusterCIDR, options.ServiceCIDRs = test.cluster, test.service

		if options.MachineSocket, options.Talosconfig = "", "/talosconfig"; test.socket != "" {
			options.MachineSocket, options.Talosconfig = test.socket, ""
		}

		assertRefused(t, options.Validate(), test.refused, test)
	}
}

// The RBAC objects of the extension allow one lease. A pod may have others.
func TestOptions_Lease(t *testing.T) {
	for _, socket := range []string{"", "/run/machine.sock"} {
		options := withControllers(t, "*")
		options.MachineSocket, options.RunDir, options.Talosconfig = socket, "/run/talos-ccm", ""

		if socket == "" {
			options.Talosconfig = "/talosconfig"
		}

		assert.NoError(t, options.Validate())

		options.Framework.Generic.LeaderElection.ResourceName = "other"

		assert.Equal(t, socket == "", options.Validate() == nil)

		options.Framework.Generic.ClientConnection.Kubeconfig = "/kubeconfig"

		assert.Equal(t, socket == "", options.Validate() == nil)
	}
}

func TestOptions_PodCIDRs(t *testing.T) {
	for _, test := range []struct {
		cluster, service, allocator string
		size, ipv4, ipv6            int
		refused                     string // part of the error; empty if valid
	}{
		{},
		{cluster: "10.244.0.0/16,fd00::/56", service: "10.96.0.0/12", allocator: "CloudAllocator", ipv4: 25, ipv6: 96},
		{cluster: "fd00::/48", size: 64},
		{cluster: "fd00::/16", size: 24},
		{size: 80},
		{allocator: "cloudallocator", refused: `unknown CIDR allocator type "cloudallocator"`},
		{cluster: "10.244.0.0/25", refused: "10.244.0.0/25"},
		{cluster: "10.244.0.0", refused: "--cluster-cidr"},
		{cluster: "10.244.0.0/16,ff05::/16", refused: "--cluster-cidr: ff05::/16 contains multicast addresses"},
		{service: "10.96.0.0/33", refused: "--service-cluster-ip-range"},
		{ipv4: 99, refused: "99"},
		{size: 129, refused: "129"},
		{cluster: "10.0.0.0/8,10.1.0.0/16", refused: "--cluster-cidr: 10.1.0.0/16 overlaps 10.0.0.0/8"},
		{cluster: "10.1.0.0/16,10.1.0.0/16", refused: "--cluster-cidr: 10.1.0.0/16 overlaps 10.1.0.0/16"},
		{cluster: "10.96.0.0/12", service: "10.96.0.0/12", refused: "--cluster-cidr: 10.96.0.0/12 is within the service CIDR 10.96.0.0/12"},
		{cluster: "10.96.0.0/16", service: "10.96.0.0/12", refused: "--cluster-cidr: 10.96.0.0/16 is within the service CIDR 10.96.0.0/12"},
		{cluster: "10.0.0.0/8", service: "10.96.0.0/12"},
		{ipv4: -1, refused: "-1"},
		{ipv6: 129, refused: "129"},
		{size: 24, ipv4: 25, refused: "cannot be combined"},
		{cluster: "10.244.0.0/16,fd00::/56", size: 24, refused: "single-stack"},
	} {
		options := withControllers(t, "*")
		options.Framework.KubeCloudShared.ClusterCIDR, options.ServiceCIDRs = test.cluster, test.service
		options.NodeCIDRMaskSize, options.NodeCIDRMaskSizeIPv4, options.NodeCIDRMaskSizeIPv6 = test.size, test.ipv4, test.ipv6

		if test.allocator != "" {
			options.Framework.KubeCloudShared.CIDRAllocatorType = test.allocator
		}

		assertRefused(t, options.Validate(), test.refused, test)
	}
}

func withControllers(t *testing.T, controllers ...string) *ccm.Options {
	t.Helper()

	options, err := ccm.NewOptions()
	require.NoError(t, err)

	options.MachineSocket, options.RunDir = "/machine.sock", "/run"
	options.Framework.Generic.Controllers = controllers

	return options
}

// If the API server does not respond, another instance may acquire the lease when it has expired. The controllers
// must have stopped by then, without waiting for the release of the lease.
func TestManager_StopsBeforeLeaseExpiresIfAPIServerHangs(t *testing.T) {
	s, self, worker := newCluster(t)

	config := s.Kube.Config()
	proxy := ctest.NewProxy(t, config)

	options := s.options(self)
	options.Framework.Generic.ClientConnection.Kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(s, os.WriteFile(options.Framework.Generic.ClientConnection.Kubeconfig, kube.Kubeconfig(config), 0o600))

	// After the renew deadline, the elector waits too long for the release of the lease: half of the deadline.
	election := &options.Framework.Generic.LeaderElection
	election.LeaseDuration.Duration, election.RenewDeadline.Duration, election.RetryPeriod.Duration = 16*time.Second, 12*time.Second, time.Second

	r := s.launch(options)
	s.awaitInitialized(self, worker)
	proxy.Hangs.Store(true)

	lease := s.lease()
	ctest.Eventually(s, "worker is no longer watched", func() bool { return worker.Connections() == 0 })

	assert.LessOrEqual(t, time.Since(lease.Spec.RenewTime.Time), election.LeaseDuration.Duration, "after the last renewal of the lease")

	ctest.Receive(s, r.ended, "talos-ccm ends")

	assert.ErrorAs(t, r.err, new(*ccm.RestartError))
}

// After the API server was down, KubePrism does not use it for up to a minute.
func TestManager_PrefersLocalAPIServerToKubePrism(t *testing.T) {
	s := newSuite(t)

	config := s.Kube.Config()
	port, err := strconv.ParseUint(config.Host[strings.LastIndex(config.Host, ":")+1:], 10, 16)
	require.NoError(s, err)

	ctest.NewProxy(t, config).Hangs.Store(true)

	self := s.controlPlane("cp", func(spec *talostest.MachineSpec) { spec.LocalhostAdminKubeconfig = string(kube.Kubeconfig(config)) })
	prism := k8s.NewKubePrismConfig(k8s.NamespaceName, k8s.KubePrismConfigID)
	prism.TypedSpec().Host, prism.TypedSpec().Endpoints = "127.0.0.1", []k8s.KubePrismEndpoint{{Host: "localhost", Port: uint32(port)}}
	require.NoError(s, self.State().Create(t.Context(), prism))
	s.register(self)

	options := s.options(self)
	options.Framework.SecureServing.BindPort, options.Framework.SecureServing.PermitPortSharing = reservedPort(t), true

	s.start(options)
	s.awaitInitialized(self)
}

// The other machines do not depend on responses of the local machine.
func TestManager_InitializesOthersIfLocalMachineHangs(t *testing.T) {
	s, self, worker := newCluster(t)
	// Only the leader dials machines.
	s.leaseTo("other", time.Hour)

	s.start(s.options(self))
	ctest.Eventually(s, "talos-ccm runs for leader election", func() bool { return calls(self, "/cosi.resource.State/Get", cluster.IdentityType) > 0 })

	self.Freeze()
	s.freeLease()
	s.awaitInitialized(worker)

	s.assertUninitialized(self)

	self.Thaw()
	s.awaitInitialized(self)
}

// Until its nodename is known, the local machine is dialed over the network like any other.
func TestManager_InitializesOthersBeforeLocalNodenameIsKnown(t *testing.T) {
	s, self, worker := newCluster(t)
	require.NoError(s, self.State().Destroy(t.Context(), k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID).Metadata()))

	s.start(s.options(self))
	s.awaitInitialized(worker)
	require.NoError(s, self.SetNodename(t.Context(), self.Nodename()))
	s.awaitInitialized(self)
}

// Only clients of the secure port are authenticated.
func TestManager_MayReviewTokensOnlyWithSecurePort(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp")
	review := authorizationv1.ResourceAttributes{Verb: "create", Group: "authentication.k8s.io", Resource: "tokenreviews"}

	for _, port := range []int{0, reservedPort(t), 0} { // first 0: another test may have left the permission
		options := s.options(self)
		options.Framework.SecureServing.BindPort, options.Framework.SecureServing.PermitPortSharing = port, true

		r := s.start(options)
		ctest.Eventually(s, fmt.Sprintf("ServiceAccount may review tokens with port %d: %t", port, port > 0), func() bool { return s.isAllowed(review) == (port > 0) })
		r.stop()
	}
}

// takePort makes another process listen on the secure port of the options until release is called.
func (s *suite) takePort(options *ccm.Options) (addr string, release func()) {
	s.Helper()

	other, err := (&net.ListenConfig{}).Listen(s.Context(), "tcp", "127.0.0.1:0")
	require.NoError(s, err)
	s.Cleanup(func() { _ = other.Close() })

	tcp, ok := other.Addr().(*net.TCPAddr)
	require.True(s, ok, "listener address is %s, want TCP", other.Addr())

	options.Framework.SecureServing.BindAddress, options.Framework.SecureServing.BindPort = tcp.IP, tcp.Port

	return tcp.String(), func() { require.NoError(s, other.Close()) }
}

// awaitServed waits until a port accepts connections.
func (s *suite) awaitServed(addr string) {
	s.Helper()
	ctest.Eventually(s, "port is served", func() bool {
		conn, err := (&net.Dialer{}).DialContext(s.Context(), "tcp", addr)
		if err == nil {
			_ = conn.Close()
		}

		return err == nil
	})
}

// A pod in the host network of a control-plane machine must not be able to stop all controllers.
func TestManager_LeadsWithoutSecurePort(t *testing.T) {
	s, self, worker := newCluster(t)
	options := s.options(self)
	addr, release := s.takePort(options)

	r := s.start(options)
	s.awaitInitialized(self, worker)
	s.awaitEvent(self, ccm.ReasonSecurePortUnavailable, addr, "address already in use")

	release()
	s.awaitServed(addr)
	s.move(worker, "moved")
	r.alive()
}

// The probes of a pod use the secure port.
func TestManager_WaitsForSecurePortInPod(t *testing.T) {
	s, self, worker := newCluster(t)
	options := s.outside(self)
	addr, release := s.takePort(options)

	logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(2)))
	sink, _ := logger.GetSink().(ktesting.Underlier)

	s.launchWith(klog.NewContext(t.Context(), logger), options)
	ctest.Eventually(s, "secure port is tried twice", func() bool {
		return strings.Count(sink.GetBuffer().String(), "API server or secure port not available; retrying") >= 2
	})
	assert.Empty(t, s.holder())

	release()
	s.awaitServed(addr)
	s.awaitInitialized(self, worker)
}
