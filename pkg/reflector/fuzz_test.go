package reflector_test

import (
	"context"
	"fmt"
	"net/netip"
	goruntime "runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

const (
	// maxGrowth is more than the inventory keeps of one machine and the test of its calls.
	maxGrowth = 4 << 20
	// minMessage is less than an attacker's message with an ID.
	minMessage = 64
	// testGoroutines is more than the goroutines that run one input.
	testGoroutines = 5
)

// program is what a machine sends: numbers, of which there are only zeros after the end.
type program []byte

func (p *program) next() int {
	if len(*p) == 0 {
		return 0
	}

	first := (*p)[0]
	*p = (*p)[1:]

	return int(first)
}

// size returns a power of two, or one less.
func (p *program) size() int { return 1<<(p.next()%18) - p.next()%2 }

// text returns a text of a size.
func (p *program) text() string { return strings.Repeat("x", p.size()) }

// texts returns as many keys as a size.
func (p *program) texts() map[string]string {
	texts := map[string]string{}
	for i := range p.size() {
		texts[strconv.Itoa(i)] = ""
	}

	return texts
}

// resource returns a resource of a kind with some changes.
func (p *program) resource(kind resource.Kind, kinds []resource.Kind) *v1alpha1.Resource {
	r := &v1alpha1.Resource{
		Metadata: &v1alpha1.Metadata{Namespace: kind.Namespace(), Type: kind.Type(), Id: "x", Version: "1", Phase: "running"}, Spec: &v1alpha1.Spec{},
	}
	md, spec := r.GetMetadata(), r.GetSpec()
	changes := []func(){
		func() { md.Labels = p.texts() },
		func() { md.Annotations = p.texts() },
		func() { md.Finalizers = make([]string, p.size()) },
		func() { md.Id = p.text() },
		func() { md.Version = p.text() },
		func() { md.Phase = p.text() },
		func() { md.Namespace = p.text() },
		func() { md.Type = kinds[p.next()%len(kinds)].Type() },
		func() { r.Metadata = nil },
		func() { r.Spec = nil },
		func() { spec.YamlSpec = p.text() },
		func() { spec.ProtoSpec = p.repeated() },
		func() { spec.ProtoSpec = p.nested() },
	}

	for range p.next() % 5 {
		changes[p.next()%len(changes)]()
	}

	return r
}

// repeated returns a field with many empty elements, in another field or not.
func (p *program) repeated() (message []byte) {
	element := protowire.AppendBytes(protowire.AppendTag(nil, protowire.Number(p.next()%34+1), protowire.BytesType), nil)
	message = []byte(strings.Repeat(string(element), p.size()))

	if outer := p.next() % 4; outer > 0 {
		message = protowire.AppendBytes(protowire.AppendTag(nil, protowire.Number(outer), protowire.BytesType), message)
	}

	return message
}

// nested returns messages within messages.
func (p *program) nested() (message []byte) {
	field := protowire.Number(p.next()%4 + 1)
	for range min(p.size(), 2000) {
		message = protowire.AppendBytes(protowire.AppendTag(nil, field, protowire.BytesType), message)
	}

	return message
}

// answer sends resources of one kind, and then what the machine has.
func (p *program) answer(kinds []resource.Kind) talostest.Answer {
	kind := kinds[p.next()%len(kinds)]
	r := p.resource(kind, kinds)
	messages, isNumbered := min(p.size(), (16<<20)/max(proto.Size(r), minMessage)), p.next()%2 == 0

	events := make([]*v1alpha1.Event, min(p.size(), (4<<20)/max(proto.Size(r), 2)))
	for i := range events {
		events[i] = &v1alpha1.Event{EventType: v1alpha1.EventType(p.next() % 8), Resource: r}
	}

	if p.next()%4 == 0 {
		for _, event := range events {
			event.Resource = nil
		}
	}

	return func(request proto.Message, stream grpc.ServerStream, honest func() error) error {
		typed, _ := request.(interface{ GetType() string })
		if typed.GetType() != kind.Type() {
			return honest()
		}

		// Of each request, because a machine answers several at once.
		message := proto.Clone(&v1alpha1.ListResponse{Resource: r})
		if _, isWatch := request.(*v1alpha1.WatchRequest); isWatch {
			message = proto.Clone(&v1alpha1.WatchResponse{Event: events})

			if err := stream.SendMsg(&v1alpha1.WatchResponse{}); err != nil {
				return err
			}
		}

		for i := range messages {
			if list, isList := message.(*v1alpha1.ListResponse); isNumbered && isList && r.GetMetadata() != nil {
				list.Resource.Metadata.Id = strconv.Itoa(i)
			}

			if err := stream.SendMsg(message); err != nil {
				return err
			}
		}

		return honest()
	}
}

// usage is what attacks must not use up.
type usage struct {
	heap       uint64
	goroutines int
}

func measure() usage {
	goruntime.GC()

	var stats goruntime.MemStats

	goruntime.ReadMemStats(&stats)

	return usage{heap: stats.HeapAlloc, goroutines: goruntime.NumGoroutine()}
}

// Whatever a machine sends, memory and goroutines return to what they were, and other machines are not affected.
func FuzzMachine_SendsAnything(f *testing.F) {
	for _, seed := range []program{
		{},
		{2, 1, 0, 15, 1},                        // labels
		{2, 1, 2, 17, 1},                        // finalizers
		{2, 0, 3, 0, 17, 0},                     // empty events
		{2, 1, 11, 3, 15, 0, 3},                 // empty unmet conditions
		{1, 1, 12, 0, 11, 0},                    // nested
		{12, 0, 17, 0, 0, 0, 0},                 // many volumes
		{13, 1, 10, 16, 0, 6, 0, 1, 1},          // large links
		{1, 2, 3, 16, 0, 3, 17, 0, 17, 0, 1, 1}, // long IDs
		{9, 2, 8, 9, 1, 0},                      // neither metadata nor spec
	} {
		f.Add([]byte(seed))
	}

	talos := ctest.NewTalos(f, talostest.Options{})
	machines := inventory.New(time.Now)
	refl := reflector.New(machines, ctest.Dial(talos), clock.RealClock{})
	refl.Kinds = refl.Kinds.WithFacts(machine.AllFacts)

	ended := make(chan struct{})

	go func() {
		defer close(ended)

		refl.Run(f.Context())
	}()

	f.Cleanup(func() { <-ended })

	hostile, err := talos.AddMachine(talostest.MachineSpec{Nodename: "hostile"})
	require.NoError(f, err)

	honest, err := talos.AddMachine(talostest.MachineSpec{Nodename: "honest"})
	require.NoError(f, err)

	kinds := machine.BaseKinds().WithFacts(machine.AllFacts).All()
	track := func(t testing.TB, m *talostest.Machine) {
		t.Helper()
		refl.Track(m.Nodename(), []netip.Addr{m.Address()}, reflector.Unknown)
		ctest.Eventually(t, m.Nodename()+" has answered", func() bool { return machines.Get(m.Nodename()).Condition != inventory.Unknown })
	}

	track(f, honest)
	track(f, hostile)
	refl.Untrack("hostile")
	ctest.Eventually(f, "the session has ended", func() bool { return hostile.Connections() == 0 })

	f.Fuzz(func(t *testing.T, input []byte) {
		p, before := program(input), measure() // package testing needs memory between inputs
		hostile.Lie(p.answer(kinds))
		track(t, hostile)
		refl.Untrack("hostile")
		hostile.Lie(nil)

		began := time.Now()

		ctest.EventuallyNoError(t, func(context.Context) error {
			now := measure()
			if now.goroutines > before.goroutines+testGoroutines || now.heap > before.heap+maxGrowth {
				return fmt.Errorf("before the attack %+v, now %+v", before, now)
			}

			return nil
		})
		require.Less(t, time.Since(began), time.Minute)
		require.Equal(t, inventory.Current, machines.Get("honest").Condition)
	})
}
