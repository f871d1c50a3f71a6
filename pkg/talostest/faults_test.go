package talostest_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"google.golang.org/grpc/codes"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// impatience is long enough for an answer on loopback, and short enough to wait for none.
const impatience = 300 * time.Millisecond

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

// watchPlatform watches PlatformMetadata as our reflector does, and returns after the bootstrap.
func watchPlatform(t *testing.T, c *client.Client) <-chan state.Event {
	t.Helper()

	events := make(chan state.Event)
	kind := resource.NewMetadata(runtime.NamespaceName, runtime.PlatformMetadataType, "", resource.VersionUndefined)

	if err := c.COSI.WatchKind(t.Context(), kind, events, state.WithBootstrapContents(true)); err != nil {
		t.Fatalf("watch: %v", err)
	}

	if got := next(t, events); got.Type != state.Created {
		t.Fatalf("got %s first, want the contents", got.Type)
	}

	if got := next(t, events); got.Type != state.Bootstrapped {
		t.Fatalf("got %s after the contents, want Bootstrapped", got.Type)
	}

	return events
}

func next(t *testing.T, events <-chan state.Event) state.Event {
	t.Helper()

	select {
	case event := <-events:
		return event
	case <-time.After(patience):
		t.Fatalf("no event within %s", patience)

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

// openWatch starts a watch without the COSI client, which would resume a broken one by itself.
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

// bookmarkOf reads a stream up to its first bookmark.
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

// failure reads a stream to its end.
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

func TestWatchSeesChanges(t *testing.T) {
	cluster, worker := newWorker(t)
	events := watchPlatform(t, dialAs(t, cluster, worker, "os:reader"))

	setZone(t, worker, "zone-1")
	requireZone(t, next(t, events), "zone-1")

	setZone(t, worker, "zone-2")
	requireZone(t, next(t, events), "zone-2")
}

func TestRebootRefusesOldBookmarks(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")

	setZone(t, worker, "zone-1")

	bookmark := bookmarkOf(t, openWatch(t, reader, &v1alpha1.WatchOptions{BootstrapBookmark: true}))
	resume := &v1alpha1.WatchOptions{StartFromBookmark: bookmark}

	setZone(t, worker, "zone-2")

	if got := bookmarkOf(t, openWatch(t, reader, resume)); string(got) == string(bookmark) {
		t.Fatal("the watch did not go on after its bookmark")
	}

	if err := worker.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}

	setZone(t, worker, "zone-3")

	again := dialAs(t, cluster, worker, "os:reader")
	requireCode(t, failure(t, openWatch(t, again, resume)), codes.FailedPrecondition)
}

func TestWatchErrsAfterReboot(t *testing.T) {
	cluster, worker := newWorker(t)
	events := watchPlatform(t, dialAs(t, cluster, worker, "os:reader"))

	if err := worker.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}

	if got := next(t, events); got.Type != state.Errored {
		t.Fatalf("got %s, want Errored", got.Type)
	}
}

func TestRebootKeepsResourcesAndRestartsVersions(t *testing.T) {
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

func TestRebootBreaksMachineSocketToo(t *testing.T) {
	_, cp := newControlPlane(t)
	socket := dialSocket(t, cp)

	requireCode(t, version(claiming(withDeadline(t), "os:reader"), socket), codes.OK)

	if err := cp.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}

	requireCode(t, version(claiming(withDeadline(t), "os:reader"), socket), codes.Unavailable)

	cp.Start()
	eventually(t, "machine.sock answers again", func() bool {
		return version(claiming(withDeadline(t), "os:reader"), socket) == nil
	})
}

func TestCutOff(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	events := watchPlatform(t, reader)

	worker.CutOff()
	setZone(t, worker, "zone-1")

	requireCode(t, versionWithin(t, reader, impatience), codes.DeadlineExceeded)
	requireCode(t, versionWithin(t, dialAs(t, cluster, worker, "os:reader"), impatience), codes.DeadlineExceeded)

	select {
	case event := <-events:
		t.Fatalf("got %s through a cut wire", event.Type)
	default:
	}

	worker.Reconnect()

	requireZone(t, next(t, events), "zone-1")
	requireCode(t, version(withDeadline(t), reader), codes.OK)
	requireCode(t, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")), codes.OK)
}

func TestPowerOffIsSilent(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	stream := openWatch(t, reader, &v1alpha1.WatchOptions{BootstrapBookmark: true})
	bookmarkOf(t, stream)

	worker.CutOff()

	if err := worker.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}

	// The connection is gone on the machine's side, yet the client is told nothing: a call times out instead of failing.
	requireCode(t, versionWithin(t, reader, impatience), codes.DeadlineExceeded)
	requireCode(t, versionWithin(t, dialAs(t, cluster, worker, "os:reader"), impatience), codes.DeadlineExceeded)

	worker.Start()
	worker.Reconnect()

	requireCode(t, failure(t, stream), codes.Unavailable)
	requireCode(t, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")), codes.OK)
}

func TestBreakStreams(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	stream := openWatch(t, reader, &v1alpha1.WatchOptions{BootstrapBookmark: true})
	bookmarkOf(t, stream)

	worker.BreakStreams()

	requireCode(t, failure(t, stream), codes.Unavailable)
	requireCode(t, version(withDeadline(t), reader), codes.OK)

	if got := worker.Connections(); got != 1 {
		t.Errorf("got %d connections, want the one from before", got)
	}
}

func TestBrokenWatchResumes(t *testing.T) {
	cluster, worker := newWorker(t)
	events := watchPlatform(t, dialAs(t, cluster, worker, "os:reader"))

	worker.BreakStreams()
	setZone(t, worker, "zone-1")

	requireZone(t, next(t, events), "zone-1")
}

func TestExpiredWatchDoesNotResume(t *testing.T) {
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

func TestOpenStreamsAreCounted(t *testing.T) {
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

func TestSlowDown(t *testing.T) {
	cluster, worker := newWorker(t)
	worker.SlowDown(impatience)

	started := time.Now()
	reader := dialAs(t, cluster, worker, "os:reader")
	requireCode(t, version(withDeadline(t), reader), codes.OK)

	// Once for the handshake, once for the call.
	if took := time.Since(started); took < 2*impatience {
		t.Errorf("answered after %s", took)
	}

	requireCode(t, versionWithin(t, reader, impatience/3), codes.DeadlineExceeded)

	worker.SlowDown(0)
	requireCode(t, version(withDeadline(t), reader), codes.OK)
}

func TestFreeze(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	events := watchPlatform(t, reader)

	worker.Freeze()
	setZone(t, worker, "zone-1")

	requireCode(t, versionWithin(t, reader, impatience), codes.DeadlineExceeded)

	select {
	case event := <-events:
		t.Fatalf("got %s from a frozen machine", event.Type)
	default:
	}

	worker.Thaw()
	requireZone(t, next(t, events), "zone-1")
}

func TestExpiredCertificate(t *testing.T) {
	cluster, worker := newWorker(t)
	before := dialAs(t, cluster, worker, "os:reader")
	requireCode(t, version(withDeadline(t), before), codes.OK)

	worker.ExpireCertificate()
	requireCode(t, version(withDeadline(t), before), codes.OK) // an open connection lives on

	err := version(withDeadline(t), dialAs(t, cluster, worker, "os:reader"))
	requireCode(t, err, codes.Unavailable)

	if !strings.Contains(err.Error(), "expired") {
		t.Errorf("got %v, want a complaint about an expired certificate", err)
	}

	worker.BreakConnections()
	eventually(t, "the old client sees the expired certificate", func() bool {
		return version(withDeadline(t), before) != nil
	})

	worker.RenewCertificate()
	requireCode(t, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")), codes.OK)
}
