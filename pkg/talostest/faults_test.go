package talostest_test

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"google.golang.org/grpc/codes"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// shortTimeout is long enough for a reply on loopback, and short enough for tests that expect none.
const shortTimeout = 300 * time.Millisecond

func newWorker(t *testing.T) (*talostest.Cluster, *talostest.Machine) {
	t.Helper()

	cluster := newCluster(t, talostest.Options{})

	return cluster, addMachine(t, cluster, talostest.MachineSpec{
		Nodename: "worker-1", Platform: runtime.PlatformMetadataSpec{Platform: "aws", Zone: "zone-0"},
	})
}

func setZone(t *testing.T, m *talostest.Machine, zone string) {
	t.Helper()

	if err := m.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone = zone }); err != nil {
		t.Fatal(err)
	}
}

// watchPlatform watches PlatformMetadata like the reflector does. It returns after the bootstrap.
func watchPlatform(t *testing.T, c *client.Client) <-chan state.Event {
	t.Helper()

	events := make(chan state.Event)
	kind := resource.NewMetadata(runtime.NamespaceName, runtime.PlatformMetadataType, "", resource.VersionUndefined)

	if err := c.COSI.WatchKind(t.Context(), kind, events, state.WithBootstrapContents(true)); err != nil {
		t.Fatalf("watch: %v", err)
	}

	if got := next(t, events); got.Type != state.Created {
		t.Fatalf("got %s as first event, want Created", got.Type)
	}

	if got := next(t, events); got.Type != state.Bootstrapped {
		t.Fatalf("got %s as second event, want Bootstrapped", got.Type)
	}

	return events
}

func next(t *testing.T, events <-chan state.Event) state.Event {
	t.Helper()

	select {
	case event := <-events:
		return event
	case <-time.After(timeout):
		t.Fatalf("no event within %s", timeout)

		return state.Event{}
	}
}

func requireZone(t *testing.T, event state.Event, want string) {
	t.Helper()

	if event.Type != state.Updated {
		t.Fatalf("got %s (%v), want an update", event.Type, event.Error)
	}

	if got := zoneOf(t, event.Resource); got != want {
		t.Fatalf("got zone %q, want %q", got, want)
	}
}

func zoneOf(t *testing.T, r resource.Resource) string {
	t.Helper()

	metadata, ok := r.(*runtime.PlatformMetadata)
	if !ok {
		t.Fatalf("got a %T, want PlatformMetadata", r)
	}

	return metadata.TypedSpec().Zone
}

// openWatch starts a watch without the COSI client, which would resume broken watches.
func openWatch(t *testing.T, c *client.Client, options *v1alpha1.WatchOptions) v1alpha1.State_WatchClient {
	t.Helper()

	stream, err := v1alpha1.NewStateClient(c.Conn()).Watch(withDeadline(t), &v1alpha1.WatchRequest{
		Namespace: runtime.NamespaceName, Type: runtime.PlatformMetadataType, Options: options, ApiVersion: 1,
	})
	if err != nil {
		t.Fatalf("open watch: %v", err)
	}

	return stream
}

// bookmarkOf reads a stream up to its first bookmark and returns it.
func bookmarkOf(t *testing.T, stream v1alpha1.State_WatchClient) []byte {
	t.Helper()

	for {
		response, err := stream.Recv()
		if err != nil {
			t.Fatalf("receive: %v", err)
		}

		for _, event := range response.GetEvent() {
			if len(event.GetBookmark()) > 0 {
				return event.GetBookmark()
			}
		}
	}
}

// failure reads a stream to its end and returns the error.
func failure(t *testing.T, stream v1alpha1.State_WatchClient) error {
	t.Helper()

	for {
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
}

func versionWithin(t *testing.T, c *client.Client, limit time.Duration) error {
	t.Helper()

	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()

	return version(ctx, c)
}

func TestWatch_ReceivesChanges(t *testing.T) {
	cluster, worker := newWorker(t)
	events := watchPlatform(t, dialAs(t, cluster, worker, "os:reader"))

	setZone(t, worker, "zone-1")
	requireZone(t, next(t, events), "zone-1")

	setZone(t, worker, "zone-2")
	requireZone(t, next(t, events), "zone-2")
}

func TestReboot_RejectsOldBookmarks(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")

	setZone(t, worker, "zone-1")

	bookmark := bookmarkOf(t, openWatch(t, reader, &v1alpha1.WatchOptions{BootstrapBookmark: true}))
	resume := &v1alpha1.WatchOptions{StartFromBookmark: bookmark}

	setZone(t, worker, "zone-2")

	if got := bookmarkOf(t, openWatch(t, reader, resume)); string(got) == string(bookmark) {
		t.Fatal("watch did not resume after its bookmark")
	}

	if err := worker.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}

	setZone(t, worker, "zone-3")

	again := dialAs(t, cluster, worker, "os:reader")
	requireCode(t, failure(t, openWatch(t, again, resume)), codes.FailedPrecondition)
}

func TestReboot_FailsWatches(t *testing.T) {
	cluster, worker := newWorker(t)
	events := watchPlatform(t, dialAs(t, cluster, worker, "os:reader"))

	if err := worker.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}

	if got := next(t, events); got.Type != state.Errored {
		t.Fatalf("got %s, want Errored", got.Type)
	}
}

func TestReboot_KeepsResourcesAndResetsVersions(t *testing.T) {
	cluster, worker := newWorker(t)
	setZone(t, worker, "zone-1")

	if err := worker.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}

	requireCode(t, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")), codes.Unavailable)

	metadata, err := worker.State().Get(t.Context(), runtime.NewPlatformMetadataSpec(runtime.NamespaceName, runtime.PlatformMetadataID).Metadata())
	if err != nil {
		t.Fatal(err)
	}

	if got := metadata.Metadata().Version().Value(); got != 1 {
		t.Errorf("got version %d after the restart, want 1", got)
	}

	if got := zoneOf(t, metadata); got != "zone-1" {
		t.Errorf("got zone %q", got)
	}

	worker.Start()
	requireCode(t, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")), codes.OK)
}

func TestReboot_BreaksMachineSocket(t *testing.T) {
	_, cp := newControlPlane(t)
	socket := dialSocket(t, cp)

	requireCode(t, version(withRoles(withDeadline(t), "os:reader"), socket), codes.OK)

	if err := cp.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}

	requireCode(t, version(withRoles(withDeadline(t), "os:reader"), socket), codes.Unavailable)

	cp.Start()
	eventually(t, "machine.sock responds again", func() bool {
		return version(withRoles(withDeadline(t), "os:reader"), socket) == nil
	})
}

func TestCutOff_BlocksConnections(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	events := watchPlatform(t, reader)

	worker.CutOff()
	setZone(t, worker, "zone-1")

	requireCode(t, versionWithin(t, reader, shortTimeout), codes.DeadlineExceeded)
	requireCode(t, versionWithin(t, dialAs(t, cluster, worker, "os:reader"), shortTimeout), codes.DeadlineExceeded)

	select {
	case event := <-events:
		t.Fatalf("got %s from a machine that is cut off", event.Type)
	default:
	}

	worker.Reconnect()

	requireZone(t, next(t, events), "zone-1")
	requireCode(t, version(withDeadline(t), reader), codes.OK)
	requireCode(t, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")), codes.OK)
}

func TestCutOff_HidesStop(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	stream := openWatch(t, reader, &v1alpha1.WatchOptions{BootstrapBookmark: true})
	bookmarkOf(t, stream)

	worker.CutOff()

	if err := worker.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}

	// The machine has closed the connection, but the client does not notice: a call times out instead of failing.
	requireCode(t, versionWithin(t, reader, shortTimeout), codes.DeadlineExceeded)
	requireCode(t, versionWithin(t, dialAs(t, cluster, worker, "os:reader"), shortTimeout), codes.DeadlineExceeded)

	worker.Start()
	worker.Reconnect()

	requireCode(t, failure(t, stream), codes.Unavailable)
	requireCode(t, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")), codes.OK)
}

func TestBlackHole_DropsPackets(t *testing.T) {
	cluster, worker := newWorker(t)
	events := watchPlatform(t, dialAs(t, cluster, worker, "os:reader"))

	dialer := net.Dialer{
		Timeout:         shortTimeout,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 1},
	}
	target := net.JoinHostPort(worker.Address().String(), strconv.Itoa(constants.ApidPort))

	open, err := dialer.DialContext(t.Context(), "tcp", target)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close() //nolint:errcheck // only read

	eventually(t, "both connections are accepted", func() bool { return worker.Connections() == 2 })

	if err := worker.BlackHole(); err != nil {
		t.Fatal(err)
	}

	setZone(t, worker, "zone-1")

	if _, err := open.Read(make([]byte, 1)); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("open connection: got %v, want %v", err, syscall.ETIMEDOUT)
	}

	_, err = dialer.DialContext(t.Context(), "tcp", target)
	if timeout := net.Error(nil); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("got %v, want a timeout", err)
	}

	worker.Reconnect()

	requireZone(t, next(t, events), "zone-1")
	requireCode(t, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")), codes.OK)
}

func TestBreakStreams_KeepsConnections(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	stream := openWatch(t, reader, &v1alpha1.WatchOptions{BootstrapBookmark: true})
	bookmarkOf(t, stream)

	worker.BreakStreams()

	requireCode(t, failure(t, stream), codes.Unavailable)
	requireCode(t, version(withDeadline(t), reader), codes.OK)

	if got := worker.Connections(); got != 1 {
		t.Errorf("got %d connections, want the original one", got)
	}
}

func TestBreakStreams_WatchResumes(t *testing.T) {
	cluster, worker := newWorker(t)
	events := watchPlatform(t, dialAs(t, cluster, worker, "os:reader"))

	worker.BreakStreams()
	setZone(t, worker, "zone-1")

	requireZone(t, next(t, events), "zone-1")
}

func TestExpireWatches_WatchDoesNotResume(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	events := watchPlatform(t, reader)

	worker.ExpireWatches()

	if got := next(t, events); got.Type != state.Errored {
		t.Fatalf("got %s, want Errored", got.Type)
	}

	again := watchPlatform(t, reader)

	setZone(t, worker, "zone-1")
	requireZone(t, next(t, again), "zone-1")
}

func TestOpenStreams_CountsStreams(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")

	watchPlatform(t, reader)
	watchPlatform(t, reader)

	if got := worker.OpenStreams(); got != 2 {
		t.Errorf("got %d open streams, want 2", got)
	}

	_ = reader.Close()

	eventually(t, "no stream is open", func() bool { return worker.OpenStreams() == 0 && worker.Connections() == 0 })
}

func TestSlowDown_DelaysHandshakeAndCalls(t *testing.T) {
	cluster, worker := newWorker(t)
	worker.SlowDown(shortTimeout)

	started := time.Now()
	reader := dialAs(t, cluster, worker, "os:reader")
	requireCode(t, version(withDeadline(t), reader), codes.OK)

	// One delay for the handshake and one for the call.
	if took := time.Since(started); took < 2*shortTimeout {
		t.Errorf("call took %s", took)
	}

	requireCode(t, versionWithin(t, reader, shortTimeout/3), codes.DeadlineExceeded)

	worker.SlowDown(0)
	requireCode(t, version(withDeadline(t), reader), codes.OK)
}

func TestFreeze_StopsResponses(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	events := watchPlatform(t, reader)

	worker.Freeze()
	setZone(t, worker, "zone-1")

	requireCode(t, versionWithin(t, reader, shortTimeout), codes.DeadlineExceeded)

	select {
	case event := <-events:
		t.Fatalf("got %s from a frozen machine", event.Type)
	default:
	}

	worker.Thaw()
	requireZone(t, next(t, events), "zone-1")
}

func TestExpireCertificate_RejectsNewConnections(t *testing.T) {
	cluster, worker := newWorker(t)
	before := dialAs(t, cluster, worker, "os:reader")
	requireCode(t, version(withDeadline(t), before), codes.OK)

	worker.ExpireCertificate()
	requireCode(t, version(withDeadline(t), before), codes.OK) // open connections stay

	err := version(withDeadline(t), dialAs(t, cluster, worker, "os:reader"))
	requireCode(t, err, codes.Unavailable)

	if !strings.Contains(err.Error(), "expired") {
		t.Errorf("got %v, want an error about an expired certificate", err)
	}

	worker.BreakConnections()
	eventually(t, "the old client receives the expired certificate", func() bool {
		return version(withDeadline(t), before) != nil
	})

	worker.RenewCertificate()
	requireCode(t, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")), codes.OK)
}
