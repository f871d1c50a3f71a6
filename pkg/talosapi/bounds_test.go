package talosapi_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

var statusKind = resource.NewMetadata(runtime.NamespaceName, runtime.MachineStatusType, "", resource.VersionUndefined)

// machineStatus is a MachineStatus as a machine sends it, after changes.
func machineStatus(changes ...func(*v1alpha1.Resource)) *v1alpha1.Resource {
	r := &v1alpha1.Resource{
		Metadata: &v1alpha1.Metadata{
			Namespace: statusKind.Namespace(), Type: statusKind.Type(), Id: runtime.MachineStatusID, Version: "1", Phase: "running",
		},
		Spec: &v1alpha1.Spec{},
	}

	for _, change := range changes {
		change(r)
	}

	return r
}

func withLabels(n int) func(*v1alpha1.Resource) {
	return func(r *v1alpha1.Resource) {
		r.Metadata.Labels = map[string]string{}

		for i := range n {
			r.Metadata.Labels[strconv.Itoa(i)] = ""
		}
	}
}

func withMetadata(labels, annotations, finalizers int) func(*v1alpha1.Resource) {
	return func(r *v1alpha1.Resource) {
		withLabels(annotations)(r)
		r.Metadata.Annotations = r.Metadata.GetLabels()
		withLabels(labels)(r)
		r.Metadata.Finalizers = make([]string, finalizers)

		for i := range finalizers {
			r.Metadata.Finalizers[i] = strconv.Itoa(i)
		}
	}
}

func withYAML(size int) func(*v1alpha1.Resource) {
	return func(r *v1alpha1.Resource) { r.Spec.YamlSpec = strings.Repeat("x", size) }
}

func ofType(typ resource.Type) func(*v1alpha1.Resource) {
	return func(r *v1alpha1.Resource) { r.Metadata.Type = typ }
}

func withEmptyConditions(n int) func(*v1alpha1.Resource) {
	return func(r *v1alpha1.Resource) {
		conditions := strings.Repeat("\x12\x00", n) // MachineStatusStatus.UnmetConditions
		r.Spec.ProtoSpec = append(protoBytes(2, len(conditions)), conditions...)
	}
}

// protoBytes is the beginning of a field of bytes.
func protoBytes(field, length int) []byte {
	header := []byte{byte(field<<3 | 2)}

	for ; length >= 0x80; length >>= 7 {
		header = append(header, byte(length)|0x80)
	}

	return append(header, byte(length))
}

// sending answers with these resources, and then as the machine does.
func sending(resources ...*v1alpha1.Resource) talostest.Answer {
	return func(request proto.Message, stream grpc.ServerStream, honest func() error) error {
		_, isWatch := request.(*v1alpha1.WatchRequest)
		if isWatch {
			if err := stream.SendMsg(&v1alpha1.WatchResponse{}); err != nil {
				return err
			}
		}

		for _, r := range resources {
			var message proto.Message = &v1alpha1.ListResponse{Resource: r}
			if isWatch {
				message = &v1alpha1.WatchResponse{Event: []*v1alpha1.Event{{Resource: r}}}
			}

			if err := stream.SendMsg(message); err != nil {
				return err
			}
		}

		return honest()
	}
}

// sendingEvents answers with one message of a watch.
func sendingEvents(events ...*v1alpha1.Event) talostest.Answer {
	return func(_ proto.Message, stream grpc.ServerStream, _ func() error) error {
		if err := stream.SendMsg(&v1alpha1.WatchResponse{}); err != nil {
			return err
		}

		if err := stream.SendMsg(&v1alpha1.WatchResponse{Event: events}); err != nil {
			return err
		}

		<-stream.Context().Done()

		return stream.Context().Err()
	}
}

// listAndWatch returns the errors of a list and of a watch.
func listAndWatch(t *testing.T, st talosapi.State, kind resource.Kind) (listErr, watchErr error) {
	t.Helper()

	_, listErr = st.List(t.Context(), kind)

	return listErr, watchErrOf(t, st, kind)
}

// watchErrOf returns the error of a watch; nil if it sends all resources.
func watchErrOf(t *testing.T, st talosapi.State, kind resource.Kind) error {
	t.Helper()

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	events := make(chan state.Event)
	require.NoError(t, st.WatchKind(ctx, kind, events, state.WithBootstrapContents(true)))

	for {
		switch event := <-events; event.Type {
		case state.Errored:
			return event.Error
		case state.Bootstrapped:
			return nil
		case state.Created, state.Updated, state.Destroyed, state.Noop:
		}
	}
}

func repeated(n int, r *v1alpha1.Resource) (list []*v1alpha1.Resource) {
	for i := range n {
		other, _ := proto.Clone(r).(*v1alpha1.Resource)
		other.Metadata.Id = fmt.Sprintf("%0*d", len(r.GetMetadata().GetId()), i)
		list = append(list, other)
	}

	return list
}

// What the COSI client decodes slowly, or to much more memory, does not reach it.
func TestDial_RefusesWhatExceedsLimits(t *testing.T) {
	const (
		metadata = "more than 100 labels, annotations and finalizers"
		total    = "more than 256 KiB"
		size     = "received message larger than max"
	)

	s := newSite(t, clock.RealClock{})
	st := dial(t, s.reader(t), s.worker)

	for name, c := range map[string]struct {
		resources   []*v1alpha1.Resource
		list, watch string
	}{
		"20,000 labels":          {repeated(1, machineStatus(withLabels(20_000))), metadata, size},
		"101 labels":             {repeated(1, machineStatus(withLabels(101))), metadata, metadata},
		"together 101":           {repeated(1, machineStatus(withMetadata(50, 26, 25))), metadata, metadata},
		"together 100":           {repeated(1, machineStatus(withMetadata(50, 25, 25))), "", ""},
		"3,000 empty elements":   {repeated(1, machineStatus(withEmptyConditions(3_000))), "", ""},
		"5,000 empty elements":   {repeated(1, machineStatus(withEmptyConditions(5_000))), total, total},
		"70,000 empty elements":  {repeated(1, machineStatus(withEmptyConditions(70_000))), total, size},
		"140,000 empty elements": {repeated(1, machineStatus(withEmptyConditions(140_000))), size, size},
		"512 small resources":    {repeated(511, machineStatus()), "", ""}, // and its own
		"513 small resources":    {repeated(512, machineStatus()), total, total},
		"large resources":        {repeated(3, machineStatus(withYAML(100<<10))), total, total},
		"another type":           {repeated(1, machineStatus(ofType(network.AddressStatusType))), "another type", "another type"},
	} {
		t.Run(name, func(t *testing.T) {
			s.worker.Lie(sending(c.resources...))

			listErr, watchErr := listAndWatch(t, st, statusKind)

			for want, err := range map[*string]error{&c.list: listErr, &c.watch: watchErr} {
				if *want == "" {
					assert.NoError(t, err)
				} else {
					assert.ErrorContains(t, err, *want)
				}
			}
		})
	}

	// Other streams still work, and refused ones have ended.
	s.worker.Lie(nil)
	requireNodename(t, st, s.worker.Nodename())
	require.NoError(t, st.Close())
}

// The server answers a stream that the client does not read for as long as the connection is open.
func TestDial_EndsRefusedStreams(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	st := dial(t, s.reader(t), s.worker)

	s.worker.Lie(func(_ proto.Message, stream grpc.ServerStream, _ func() error) error {
		for {
			if err := stream.SendMsg(&v1alpha1.ListResponse{Resource: machineStatus()}); err != nil {
				return err
			}
		}
	})

	_, err := st.List(t.Context(), statusKind)
	require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
	eventuallyNoStreams(t, s.worker)
}

func TestDial_RefusesEmptyEvents(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	st := dial(t, s.reader(t), s.worker)

	for name, c := range map[string]struct {
		events int
		want   string
	}{
		"in one small message":  {2000, "changes of more than 512 KiB in a minute"},
		"in one large message":  {1 << 20, "received message larger than max"},
		"in one allowed number": {1000, ""},
	} {
		t.Run(name, func(t *testing.T) {
			created := &v1alpha1.Event{EventType: v1alpha1.EventType_CREATED}
			events := append(slices.Repeat([]*v1alpha1.Event{created}, c.events), &v1alpha1.Event{EventType: v1alpha1.EventType_BOOTSTRAPPED})

			s.worker.Lie(sendingEvents(events...))

			err := watchErrOf(t, st, statusKind)
			if c.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.want)
			}
		})
	}
}

func TestDial_RefusesLongErrorMessages(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	st := dial(t, s.reader(t), s.worker)

	s.worker.Lie(func(proto.Message, grpc.ServerStream, func() error) error {
		return status.Error(codes.Internal, strings.Repeat("x", 8<<20))
	})

	_, err := st.List(t.Context(), statusKind)
	require.Error(t, err)
	assert.Less(t, len(err.Error()), 1<<10)
}

func TestDial_LimitsGet(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	st := dial(t, s.reader(t), s.worker)

	for name, change := range map[string]func(*k8s.Nodename){
		"finalizers": func(r *k8s.Nodename) { *r.Metadata().Finalizers() = make(resource.Finalizers, 101) },
		"size":       func(r *k8s.Nodename) { r.TypedSpec().Nodename = strings.Repeat("x", 128<<10) },
	} {
		t.Run(name, func(t *testing.T) {
			excessive := k8s.NewNodename(k8s.NamespaceName, name)
			change(excessive)
			require.NoError(t, s.worker.State().Create(t.Context(), excessive))

			_, err := st.Get(t.Context(), excessive.Metadata())
			assert.Equal(t, codes.ResourceExhausted, status.Code(err), err)
		})
	}
}

// The documents of the local machine may have 1 MiB, and its socket is trusted.
func TestDialSocket_HasNoLimits(t *testing.T) {
	s := newSite(t, clock.RealClock{})

	for i := range 3 {
		large := runtime.NewExtensionStatus(runtime.NamespaceName, strconv.Itoa(i))
		large.TypedSpec().Metadata.Description = strings.Repeat("x", 1<<20)
		require.NoError(t, s.controlPlane.State().Create(t.Context(), large))
	}

	kind := resource.NewMetadata(runtime.NamespaceName, runtime.ExtensionStatusType, "", resource.VersionUndefined)

	st, err := talosapi.DialSocket(s.controlPlane.Socket())
	require.NoError(t, err)
	t.Cleanup(func() { _ = st.Close() })

	listErr, watchErr := listAndWatch(t, st, kind)
	require.NoError(t, listErr)
	require.NoError(t, watchErr)

	listErr, watchErr = listAndWatch(t, dial(t, s.reader(t), s.controlPlane), kind)
	assert.Equal(t, codes.ResourceExhausted, status.Code(listErr), listErr)
	assert.Equal(t, codes.ResourceExhausted, status.Code(watchErr), watchErr)
}

// BenchmarkDial_HostileList has 20,000 labels in a message of 214 KiB. Without limits, the COSI client needs 29 s and 13 GiB.
func BenchmarkDial_HostileList(b *testing.B) {
	b.ReportAllocs()

	hostile := machineStatus(withLabels(20_000))
	b.Logf("message of %d KiB", proto.Size(hostile)>>10)

	s := newSite(b, clock.RealClock{})
	s.worker.Lie(sending(hostile))

	st, err := talosapi.Dial(b.Context(), s.reader(b), s.worker.Address())
	require.NoError(b, err)
	b.Cleanup(func() { _ = st.Close() })

	for b.Loop() {
		if _, err := st.List(b.Context(), statusKind); err == nil {
			b.Log("list was not refused")
		}
	}
}

func eventuallyNoStreams(t *testing.T, m *talostest.Machine) {
	t.Helper()
	ctest.Eventually(t, "no stream is open", func() bool { return m.OpenStreams() == 0 })
}
