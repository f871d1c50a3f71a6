package talostest_test

import (
	"context"
	"net"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// shortTimeout is long enough for a reply on loopback, and short enough for tests that expect none.
const shortTimeout = 300 * time.Millisecond

func setZone(t *testing.T, m *talostest.Machine, zone string) {
	t.Helper()

	require.NoError(t, m.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone = zone }))
}

// watchPlatform watches PlatformMetadata as the reflector does. It returns after the bootstrap.
func watchPlatform(t *testing.T, c *client.Client) <-chan state.Event {
	t.Helper()

	events := make(chan state.Event)
	kind := resource.NewMetadata(runtime.NamespaceName, runtime.PlatformMetadataType, "", resource.VersionUndefined)

	require.NoError(t, c.COSI.WatchKind(t.Context(), kind, events, state.WithBootstrapContents(true)))
	require.Equal(t, state.Created, next(t, events).Type)
	require.Equal(t, state.Bootstrapped, next(t, events).Type)

	return events
}

func next(t *testing.T, events <-chan state.Event) state.Event {
	t.Helper()

	return ctest.Receive(t, events, "an event is received")
}

func requireNoEvent(t *testing.T, events <-chan state.Event) {
	t.Helper()

	select {
	case event := <-events:
		t.Fatalf("got %s", event.Type)
	default:
	}
}

func requireZone(t *testing.T, event state.Event, want string) {
	t.Helper()

	require.Equal(t, state.Updated, event.Type, "%v", event.Error)
	require.Equal(t, want, zoneOf(t, event.Resource))
}

func zoneOf(t *testing.T, r resource.Resource) string {
	t.Helper()
	require.IsType(t, &runtime.PlatformMetadata{}, r)

	metadata, _ := r.(*runtime.PlatformMetadata)

	return metadata.TypedSpec().Zone
}

// openWatch starts a watch without the COSI client, which would resume broken watches.
func openWatch(t *testing.T, c *client.Client, options *v1alpha1.WatchOptions) v1alpha1.State_WatchClient {
	t.Helper()

	stream, err := v1alpha1.NewStateClient(c.Conn()).Watch(withDeadline(t), &v1alpha1.WatchRequest{
		Namespace: runtime.NamespaceName, Type: runtime.PlatformMetadataType, Options: options, ApiVersion: 1,
	})
	require.NoError(t, err)

	return stream
}

// bookmarkOf reads a stream up to its first bookmark and returns it.
func bookmarkOf(t *testing.T, stream v1alpha1.State_WatchClient) []byte {
	t.Helper()

	for {
		response, err := stream.Recv()
		require.NoError(t, err)

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

	require.NotEqual(t, bookmark, bookmarkOf(t, openWatch(t, reader, resume)), "the watch did not resume after its bookmark")

	require.NoError(t, worker.Reboot(t.Context()))

	setZone(t, worker, "zone-3")

	again := dialAs(t, cluster, worker, "os:reader")
	requireCode(t, codes.FailedPrecondition, failure(t, openWatch(t, again, resume)))
}

func TestReboot_FailsWatches(t *testing.T) {
	cluster, worker := newWorker(t)
	events := watchPlatform(t, dialAs(t, cluster, worker, "os:reader"))

	require.NoError(t, worker.Reboot(t.Context()))

	require.Equal(t, state.Errored, next(t, events).Type)
}

func TestReboot_KeepsResourcesAndResetsVersions(t *testing.T) {
	cluster, worker := newWorker(t)
	setZone(t, worker, "zone-1")

	require.NoError(t, worker.Stop(t.Context()))

	requireCode(t, codes.Unavailable, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")))

	metadata, err := worker.State().Get(t.Context(), runtime.NewPlatformMetadataSpec(runtime.NamespaceName, runtime.PlatformMetadataID).Metadata())
	require.NoError(t, err)

	assert.EqualValues(t, 1, metadata.Metadata().Version().Value())
	assert.Equal(t, "zone-1", zoneOf(t, metadata))

	worker.Start()
	requireCode(t, codes.OK, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")))
}

func TestReboot_BreaksMachineSocket(t *testing.T) {
	_, cp := newControlPlane(t)
	socket := dialSocket(t, cp)

	requireCode(t, codes.OK, version(withRole(withDeadline(t), "os:reader"), socket))

	require.NoError(t, cp.Stop(t.Context()))

	requireCode(t, codes.Unavailable, version(withRole(withDeadline(t), "os:reader"), socket))

	cp.Start()
	ctest.Eventually(t, "machine.sock responds again", func() bool {
		return version(withRole(withDeadline(t), "os:reader"), socket) == nil
	})
}

func TestCutOff_BlocksConnections(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	events := watchPlatform(t, reader)

	worker.CutOff()
	setZone(t, worker, "zone-1")

	requireCode(t, codes.DeadlineExceeded, versionWithin(t, reader, shortTimeout))
	requireCode(t, codes.DeadlineExceeded, versionWithin(t, dialAs(t, cluster, worker, "os:reader"), shortTimeout))

	requireNoEvent(t, events)

	worker.Reconnect()

	requireZone(t, next(t, events), "zone-1")
	requireCode(t, codes.OK, version(withDeadline(t), reader))
	requireCode(t, codes.OK, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")))
}

func TestCutOff_HidesStop(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	stream := openWatch(t, reader, &v1alpha1.WatchOptions{BootstrapBookmark: true})
	bookmarkOf(t, stream)

	worker.CutOff()

	require.NoError(t, worker.Stop(t.Context()))

	// The machine has closed the connection, but the client does not detect it: a call times out instead of failing.
	requireCode(t, codes.DeadlineExceeded, versionWithin(t, reader, shortTimeout))
	requireCode(t, codes.DeadlineExceeded, versionWithin(t, dialAs(t, cluster, worker, "os:reader"), shortTimeout))

	worker.Start()
	worker.Reconnect()

	requireCode(t, codes.Unavailable, failure(t, stream))
	requireCode(t, codes.OK, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")))
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
	require.NoError(t, err)
	defer open.Close() //nolint:errcheck // only read

	ctest.Eventually(t, "both connections are accepted", func() bool { return worker.Connections() == 2 })

	require.NoError(t, worker.BlackHole())

	setZone(t, worker, "zone-1")

	_, err = open.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ETIMEDOUT, "open connection")

	_, err = dialer.DialContext(t.Context(), "tcp", target)

	var timedOut net.Error

	require.ErrorAs(t, err, &timedOut, "new connection")
	assert.True(t, timedOut.Timeout(), "%v", err)

	worker.Reconnect()

	requireZone(t, next(t, events), "zone-1")
	requireCode(t, codes.OK, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")))
}

func TestBreakStreams_KeepsConnections(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	stream := openWatch(t, reader, &v1alpha1.WatchOptions{BootstrapBookmark: true})
	bookmarkOf(t, stream)

	worker.BreakStreams()

	requireCode(t, codes.Unavailable, failure(t, stream))
	requireCode(t, codes.OK, version(withDeadline(t), reader))

	assert.Equal(t, 1, worker.Connections())
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
	require.Equal(t, state.Errored, next(t, events).Type)

	again := watchPlatform(t, reader)

	setZone(t, worker, "zone-1")
	requireZone(t, next(t, again), "zone-1")
}

func TestOpenStreams_CountsStreams(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")

	watchPlatform(t, reader)
	watchPlatform(t, reader)

	assert.Equal(t, 2, worker.OpenStreams())

	_ = reader.Close()

	ctest.Eventually(t, "no stream is open", func() bool { return worker.OpenStreams() == 0 && worker.Connections() == 0 })
}

func TestSlowDown_DelaysHandshakeAndCalls(t *testing.T) {
	cluster, worker := newWorker(t)
	worker.SlowDown(shortTimeout)

	started := time.Now()
	reader := dialAs(t, cluster, worker, "os:reader")
	requireCode(t, codes.OK, version(withDeadline(t), reader))

	// One delay for the handshake and one for the call.
	assert.GreaterOrEqual(t, time.Since(started), 2*shortTimeout)

	requireCode(t, codes.DeadlineExceeded, versionWithin(t, reader, shortTimeout/3))

	worker.SlowDown(0)
	requireCode(t, codes.OK, version(withDeadline(t), reader))
}

func TestFreeze_StopsResponses(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	events := watchPlatform(t, reader)

	worker.Freeze()
	setZone(t, worker, "zone-1")

	requireCode(t, codes.DeadlineExceeded, versionWithin(t, reader, shortTimeout))

	requireNoEvent(t, events)

	worker.Thaw()
	requireZone(t, next(t, events), "zone-1")
}

func TestExpireCertificate_RejectsNewConnections(t *testing.T) {
	cluster, worker := newWorker(t)
	before := dialAs(t, cluster, worker, "os:reader")
	requireCode(t, codes.OK, version(withDeadline(t), before))

	worker.ExpireCertificate()
	requireCode(t, codes.OK, version(withDeadline(t), before)) // open connections stay

	err := version(withDeadline(t), dialAs(t, cluster, worker, "os:reader"))
	requireCode(t, codes.Unavailable, err)

	assert.ErrorContains(t, err, "expired")

	worker.BreakConnections()
	ctest.Eventually(t, "the old client receives the expired certificate", func() bool {
		return version(withDeadline(t), before) != nil
	})

	worker.RenewCertificate()
	requireCode(t, codes.OK, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")))
}
