package ccm_test

import (
	"context"
	"crypto/rand"
	"slices"
	"strings"
	"testing"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// stopLimit is the time between SIGTERM and SIGKILL of an extension service in Talos.
	stopLimit = 10 * time.Second

	leaseNamespace = "kube-system"
	leaseName      = "cloud-controller-manager-talos"
)

// beds has a control plane for each test, because talos-ccm has one lease, and some tests stop the API server.
var beds ctest.Pool

func TestMain(m *testing.M) {
	beds.Main(m, kube.Options{}, 4, func() (func(), error) { return removeBinary, nil })
}

// suite is one test with its own Talos cluster.
type suite struct {
	ctest.Suite

	prefix string
}

// newSuite returns the suite of a parallel test. Its Talos cluster has no machines. The names of its machines start
// with a prefix, which makes them unique in Kubernetes.
func newSuite(t *testing.T) *suite {
	t.Helper()

	return prepared(beds.NewSuite(t), talostest.Options{})
}

// newCluster returns a suite with a control-plane machine and a worker, whose Nodes are registered.
func newCluster(t *testing.T) (s *suite, self, worker *talostest.Machine) {
	t.Helper()

	s = newSuite(t)
	self, worker = s.controlPlane("cp"), s.worker("worker")
	s.register(self, worker)

	return s, self, worker
}

func prepared(bed ctest.Suite, options talostest.Options) *suite {
	bed.Helper()

	s := &suite{Suite: bed, prefix: strings.ToLower(rand.Text()[:6]) + "-"}
	s.Talos = ctest.NewTalos(s, options)

	// A process that another test has killed may still hold the lease.
	s.freeLease()

	return s
}

// controlPlane adds a control-plane machine on which talos-ccm can run, with changes of its spec.
func (s *suite) controlPlane(name string, changes ...func(*talostest.MachineSpec)) *talostest.Machine {
	s.Helper()

	kubelet, err := s.Kube.UserConfig("system:node:"+s.prefix+name, "system:nodes")
	require.NoError(s, err)

	spec := talostest.MachineSpec{
		Nodename: name, Type: talosmachine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: string(s.Kube.Kubeconfig()),
		KubeletCertificate: slices.Concat(kubelet.CertData, kubelet.KeyData),
	}
	for _, change := range changes {
		change(&spec)
	}

	return s.machine(spec)
}

// worker adds a worker machine.
func (s *suite) worker(name string) *talostest.Machine {
	s.Helper()

	return s.machine(talostest.MachineSpec{Nodename: name})
}

// machine adds a machine, by default with cloud metadata.
func (s *suite) machine(spec talostest.MachineSpec) *talostest.Machine {
	s.Helper()

	spec.Nodename = s.prefix + spec.Nodename
	if spec.Platform.Platform == "" {
		spec.Platform = identified(spec.Nodename)
	}

	return s.Machine(spec)
}

func identified(name string) runtime.PlatformMetadataSpec {
	return runtime.PlatformMetadataSpec{
		Platform: "hcloud", Region: "region", Zone: "zone", InstanceType: "type", InstanceID: name, ProviderID: "hcloud://" + name,
	}
}

// register registers the Nodes of machines.
func (s *suite) register(machines ...*talostest.Machine) {
	s.Helper()

	for _, m := range machines {
		s.Register(ctest.NodeOf(m))
	}
}

// run is one run of talos-ccm in this process.
type run struct {
	suite  *suite
	cancel context.CancelFunc
	ended  chan struct{}
	err    error // once ended is closed
}

// options returns the options of talos-ccm on the machine, as in the service spec except for the port.
func (s *suite) options(on *talostest.Machine) *ccm.Options {
	s.Helper()

	options, err := ccm.NewOptions()
	require.NoError(s, err)

	options.MachineSocket = on.Socket()
	options.RunDir = s.TempDir()
	options.Framework.SecureServing.BindPort = 0

	return options
}

// start runs talos-ccm until the test ends. It must then return in time and without an error.
func (s *suite) start(options *ccm.Options) *run {
	s.Helper()

	r := s.launch(options)
	s.Cleanup(func() { r.stop() })

	return r
}

// launch runs talos-ccm. The caller checks how it ends.
func (s *suite) launch(options *ccm.Options) *run {
	s.Helper()

	return s.launchWith(s.Context(), options)
}

// launchWith is launch with the values of ctx, such as a logger.
func (s *suite) launchWith(ctx context.Context, options *ccm.Options) *run {
	s.Helper()
	require.NoError(s, options.Validate())

	app, err := ccm.New(options)
	require.NoError(s, err)

	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r := &run{suite: s, cancel: cancel, ended: make(chan struct{})}

	go func() {
		defer close(r.ended)

		r.err = app.Run(ctx)
	}()

	s.Cleanup(func() {
		cancel()
		<-r.ended
	})

	return r
}

// stop ends the run as SIGTERM does.
func (r *run) stop() {
	r.suite.Helper()

	began := time.Now()

	r.cancel()

	ctest.Receive(r.suite, r.ended, "talos-ccm ends")
	require.NoError(r.suite, r.err)
	assert.LessOrEqual(r.suite, time.Since(began), stopLimit)
}

// alive fails the test if the run has ended.
func (r *run) alive() {
	r.suite.Helper()

	select {
	case <-r.ended:
		r.suite.Fatalf("talos-ccm has stopped: %v", r.err)
	default:
	}
}

func (s *suite) awaitInitialized(machines ...*talostest.Machine) {
	s.Helper()

	for _, m := range machines {
		n := s.AwaitNode(m.Nodename(), ctest.Initialized)

		assert.Equal(s, "hcloud://"+m.Nodename(), n.Spec.ProviderID)
		assert.NotEmpty(s, n.Labels[corev1.LabelTopologyZone])
	}
}

func (s *suite) assertUninitialized(m *talostest.Machine) {
	s.Helper()

	n := s.Node(m.Nodename())
	assert.True(s, nodespec.IsUninitialized(n), n.Spec.Taints)
	assert.Empty(s, n.Spec.ProviderID)
}

// move changes the instance type of the machine and waits until its Node is updated.
func (s *suite) move(m *talostest.Machine, instanceType string) {
	s.Helper()

	require.NoError(s, m.UpdatePlatform(s.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.InstanceType = instanceType }))
	s.AwaitNode(m.Nodename(), ctest.Labeled(corev1.LabelInstanceTypeStable, instanceType))
}

// lease returns the lease, or nil if it does not exist.
func (s *suite) lease() *coordinationv1.Lease {
	s.Helper()

	return ctest.Ask(s, func(ctx context.Context) (*coordinationv1.Lease, error) {
		lease, err := s.Client.CoordinationV1().Leases(leaseNamespace).Get(ctx, leaseName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil, nil
		}

		return lease, err
	})
}

// holder returns the holder of the lease, or "" if it is not held.
func (s *suite) holder() string {
	s.Helper()

	lease := s.lease()
	if lease == nil || lease.Spec.HolderIdentity == nil {
		return ""
	}

	return *lease.Spec.HolderIdentity
}

// freeLease deletes the lease.
func (s *suite) freeLease() {
	s.Helper()

	ctest.Ask(s, func(ctx context.Context) (any, error) {
		return nil, ctest.IgnoreNotFound(s.Client.CoordinationV1().Leases(leaseNamespace).Delete(ctx, leaseName, metav1.DeleteOptions{}))
	})
}

// leaseTo replaces the lease by one with the given holder, which never renews it.
func (s *suite) leaseTo(holder string, duration time.Duration) {
	s.Helper()
	s.freeLease()

	seconds, now := int32(duration.Seconds()), metav1.NowMicro()
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: leaseName},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, AcquireTime: &now, RenewTime: &now},
	}

	ctest.Ask(s, func(ctx context.Context) (*coordinationv1.Lease, error) {
		return s.Client.CoordinationV1().Leases(leaseNamespace).Create(ctx, lease, metav1.CreateOptions{})
	})
}

// renewLease renews the lease for its holder.
func (s *suite) renewLease(holder string) {
	s.Helper()

	ctest.Ask(s, func(ctx context.Context) (*coordinationv1.Lease, error) {
		lease, err := s.Client.CoordinationV1().Leases(leaseNamespace).Get(ctx, leaseName, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}

		require.Equal(s, holder, *lease.Spec.HolderIdentity)

		lease.Spec.RenewTime = new(metav1.NowMicro())

		return s.Client.CoordinationV1().Leases(leaseNamespace).Update(ctx, lease, metav1.UpdateOptions{})
	})
}
