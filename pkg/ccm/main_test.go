package ccm_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// waitTimeout bounds every wait for something that takes seconds at most, even on a busy machine.
	waitTimeout = 60 * time.Second
	interval    = 20 * time.Millisecond

	// stopLimit is what Talos gives an extension service between SIGTERM and SIGKILL.
	stopLimit = 10 * time.Second

	leaseNamespace = "kube-system"
	leaseName      = "cloud-controller-manager-talos"
)

// bed is shared by the tests of this package. The tests are not parallel, because they share the lease and the API
// server, which some of them stop.
type bed struct {
	kube   *kube.Cluster
	client kubernetes.Interface
}

var shared bed

func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		code = 1
	}

	os.Exit(code)
}

func runTests(m *testing.M) (code int, err error) {
	if shared.kube, err = kube.Start(context.Background(), kube.Options{Progress: os.Stderr}); err != nil {
		return 1, err
	}
	defer shared.kube.Stop()

	if shared.client, err = kubernetes.NewForConfig(shared.kube.Config()); err != nil {
		return 1, err
	}

	defer removeBinary()

	return m.Run(), nil
}

// suite is one test with a Talos cluster of its own.
type suite struct {
	*testing.T
	*bed

	talos  *talostest.Cluster
	prefix string
}

// newSuite returns a Talos cluster without machines. The names of its machines start with prefix.
func newSuite(t *testing.T, prefix string, options talostest.Options) *suite {
	t.Helper()

	s := &suite{T: t, bed: &shared, prefix: prefix}

	var err error

	s.talos, err = talostest.New(options)
	s.require(err)
	t.Cleanup(s.talos.Close)

	// A process that another test has killed may still hold the lease.
	s.freeLease()

	return s
}

func (s *suite) require(err error) {
	s.Helper()

	if err != nil {
		s.Fatal(err)
	}
}

// ask retries a request while the API server is overloaded or unavailable. It also works in cleanups.
func ask[T any](s *suite, question func(context.Context) (T, error)) (answer T) {
	s.Helper()

	var err error

	_ = wait.PollUntilContextTimeout(context.WithoutCancel(s.Context()), interval, waitTimeout, true, func(ctx context.Context) (bool, error) { //nolint:errcheck // err is more specific
		answer, err = question(ctx)

		return err == nil || !transient(err), nil
	})
	s.require(err)

	return answer
}

// transient reports whether the API server or etcd failed to process the request.
func transient(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return true
	}

	return status.Status().Code == http.StatusTooManyRequests || status.Status().Code >= http.StatusInternalServerError
}

// controlPlane adds a control-plane machine on which talos-ccm can run.
func (s *suite) controlPlane(name string) *talostest.Machine {
	s.Helper()

	return s.machine(talostest.MachineSpec{
		Nodename: name, Type: talosmachine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: string(s.kube.Kubeconfig()),
		Platform: identified(s.prefix + name),
	})
}

// worker adds a worker machine with cloud metadata.
func (s *suite) worker(name string) *talostest.Machine {
	s.Helper()

	return s.machine(talostest.MachineSpec{Nodename: name, Platform: identified(s.prefix + name)})
}

// machine adds a machine. The suite's prefix makes its name unique in Kubernetes.
func (s *suite) machine(spec talostest.MachineSpec) *talostest.Machine {
	s.Helper()

	spec.Nodename = s.prefix + spec.Nodename

	m, err := s.talos.AddMachine(spec)
	s.require(err)

	return m
}

func identified(name string) runtime.PlatformMetadataSpec {
	return runtime.PlatformMetadataSpec{
		Platform: "hcloud", Region: "region", Zone: "zone", InstanceType: "type", InstanceID: name, ProviderID: "hcloud://" + name,
	}
}

// register registers the Nodes of machines like their kubelets, and deletes them when the test ends.
func (s *suite) register(machines ...*talostest.Machine) {
	s.Helper()

	for _, m := range machines {
		spec := kube.NodeSpec{Name: m.Nodename(), NodeIPs: []netip.Addr{m.Address()}}
		tries := 0

		ask(s, func(ctx context.Context) (*corev1.Node, error) {
			tries++

			n, err := s.kube.RegisterNode(ctx, spec)
			if tries > 1 && apierrors.IsAlreadyExists(err) { // an earlier try succeeded
				return nil, nil
			}

			return n, err
		})
		s.Cleanup(func() {
			ask(s, func(ctx context.Context) (any, error) {
				return nil, ignoreNotFound(s.client.CoreV1().Nodes().Delete(ctx, m.Nodename(), metav1.DeleteOptions{}))
			})
		})
	}
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}

	return err
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
	s.require(err)

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
	s.require(options.Validate())

	app, err := ccm.New(options)
	s.require(err)

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

	select {
	case <-r.ended:
	case <-time.After(waitTimeout):
		r.suite.Fatalf("talos-ccm still runs %s after its context was canceled", waitTimeout)
	}

	if r.err != nil {
		r.suite.Errorf("talos-ccm returned an error: %v", r.err)
	}

	if took := time.Since(began); took > stopLimit {
		r.suite.Errorf("talos-ccm took %s to stop, want at most %s", took, stopLimit)
	}
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

var errNotYet = errors.New("not yet")

// await watches a Node, across restarts of the API server, until ok returns true.
func (s *suite) await(nodename, what string, ok func(*corev1.Node) bool) *corev1.Node {
	s.Helper()

	var last *corev1.Node

	err := wait.PollUntilContextTimeout(s.Context(), interval, waitTimeout, true, func(ctx context.Context) (bool, error) {
		n, err := s.watchUntil(ctx, nodename, ok)
		if n != nil {
			last = n
		}

		return err == nil, nil
	})
	if err != nil {
		s.Fatalf("node %s is not %s after %s: %s", nodename, what, waitTimeout, describe(last))
	}

	return last
}

// watchUntil returns the Node when ok returns true for it, or an error and the last version seen.
func (s *suite) watchUntil(ctx context.Context, nodename string, ok func(*corev1.Node) bool) (last *corev1.Node, err error) {
	selector := fields.OneTermEqualSelector(metav1.ObjectNameField, nodename).String()

	w, err := s.client.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return nil, err
	}

	defer w.Stop()

	for event := range w.ResultChan() {
		if n, isNode := event.Object.(*corev1.Node); isNode && event.Type != watch.Deleted {
			if last = n; ok(n) {
				return n, nil
			}
		}
	}

	return last, errNotYet
}

func describe(n *corev1.Node) string {
	if n == nil {
		return "absent"
	}

	return fmt.Sprintf("providerID %q, taints %v, labels %v, addresses %v", n.Spec.ProviderID, n.Spec.Taints, n.Labels, n.Status.Addresses)
}

func (s *suite) awaitInitialized(machines ...*talostest.Machine) {
	s.Helper()

	for _, m := range machines {
		n := s.await(m.Nodename(), "initialized", initialized)

		if n.Spec.ProviderID != "hcloud://"+m.Nodename() || n.Labels[corev1.LabelTopologyZone] == "" {
			s.Errorf("node %s: %s", m.Nodename(), describe(n))
		}
	}
}

func initialized(n *corev1.Node) bool { return !tainted(n) && n.Spec.ProviderID != "" }

func tainted(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == cloudproviderapi.TaintExternalCloudProvider })
}

// move moves the machine to another instance type and waits for its Node to follow.
func (s *suite) move(m *talostest.Machine, instanceType string) {
	s.Helper()

	s.require(m.UpdatePlatform(s.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.InstanceType = instanceType }))
	s.await(m.Nodename(), "of type "+instanceType, func(n *corev1.Node) bool { return n.Labels[corev1.LabelInstanceTypeStable] == instanceType })
}

func (s *suite) get(m *talostest.Machine) *corev1.Node {
	s.Helper()

	return ask(s, func(ctx context.Context) (*corev1.Node, error) {
		return s.client.CoreV1().Nodes().Get(ctx, m.Nodename(), metav1.GetOptions{})
	})
}

// eventually polls until ok returns true.
func (s *suite) eventually(what string, ok func() bool) {
	s.Helper()

	err := wait.PollUntilContextTimeout(s.Context(), interval, waitTimeout, true, func(context.Context) (bool, error) { return ok(), nil })
	if err != nil {
		s.Fatalf("condition not met after %s: %s", waitTimeout, what)
	}
}

// lease returns the lease, or nil if it does not exist.
func (s *suite) lease() *coordinationv1.Lease {
	s.Helper()

	return ask(s, func(ctx context.Context) (*coordinationv1.Lease, error) {
		lease, err := s.client.CoordinationV1().Leases(leaseNamespace).Get(ctx, leaseName, metav1.GetOptions{})
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

	ask(s, func(ctx context.Context) (any, error) {
		return nil, ignoreNotFound(s.client.CoordinationV1().Leases(leaseNamespace).Delete(ctx, leaseName, metav1.DeleteOptions{}))
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

	ask(s, func(ctx context.Context) (*coordinationv1.Lease, error) {
		return s.client.CoordinationV1().Leases(leaseNamespace).Create(ctx, lease, metav1.CreateOptions{})
	})
}

// renewLease renews the lease for its holder.
func (s *suite) renewLease(holder string) {
	s.Helper()

	ask(s, func(ctx context.Context) (*coordinationv1.Lease, error) {
		lease, err := s.client.CoordinationV1().Leases(leaseNamespace).Get(ctx, leaseName, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}

		if *lease.Spec.HolderIdentity != holder {
			s.Fatalf("lease is held by %s, want %s", *lease.Spec.HolderIdentity, holder)
		}

		lease.Spec.RenewTime = new(metav1.NowMicro())

		return s.client.CoordinationV1().Leases(leaseNamespace).Update(ctx, lease, metav1.UpdateOptions{})
	})
}
