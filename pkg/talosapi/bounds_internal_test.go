package talosapi

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func event(typ v1alpha1.EventType, id string, size int) *v1alpha1.Event {
	return &v1alpha1.Event{EventType: typ, Resource: &v1alpha1.Resource{
		Metadata: &v1alpha1.Metadata{Type: k8s.NodenameType, Id: id},
		Spec:     &v1alpha1.Spec{YamlSpec: strings.Repeat("x", size)},
	}}
}

func newBounds() *bounds {
	return &bounds{kind: k8s.NodenameType, limit: 100 << 10, sizes: map[string]int{}}
}

// An empty element takes two bytes on the wire, and up to 400 in memory.
func TestElements_CountsThoseOfRepeatedFields(t *testing.T) {
	nest := func(message string) string { return "\x0a" + string(rune(len(message))) + message }
	deep := "\x12\x00\x12\x00"

	for range 7 {
		deep = nest(deep)
	}

	for message, want := range map[string]int{
		"":                 0,
		"\x12\x00\x1a\x00": 0, // different fields
		"\x12\x00\x1a\x00\x12\x00\x08\x01\x1a\x00\x12\x00": 3,
		strings.Repeat("\xfa\x07\x00\x8a\x08\x00", 5):      9, // fields 127 and 129
		nest("\x12\x00\x12\x00"):                           1,
		deep:                                               1,
		nest("\x12\x00\x12\x00broken"):                     0, // a string
		"\x12\x00\x12\x00broken":                           1,
	} {
		count, _ := elements([]byte(message), maxDepth)
		assert.Equal(t, want, count, "%q", message)
	}
}

// A resource may change for as long as the watch lasts.
func TestBounds_LimitChangesPerMinute(t *testing.T) {
	b, now := newBounds(), time.Now()

	for minute := range 60 {
		for range 19 {
			update := event(v1alpha1.EventType_UPDATED, "a", 10<<10)
			require.NoError(t, b.checkEvents([]*v1alpha1.Event{update}, now.Add(time.Duration(minute)*time.Minute)))
		}
	}

	err := b.checkEvents([]*v1alpha1.Event{event(v1alpha1.EventType_UPDATED, "a", 10<<10)}, now.Add(59*time.Minute+59*time.Second))
	assert.Equal(t, codes.ResourceExhausted, status.Code(err), err)
}

func TestBounds_LimitResourcesThatWatchHasSent(t *testing.T) {
	for name, c := range map[string]struct {
		before, last v1alpha1.EventType
		want         codes.Code
	}{
		"created":                         {v1alpha1.EventType_CREATED, v1alpha1.EventType_CREATED, codes.ResourceExhausted},
		"an unknown type":                 {17, v1alpha1.EventType_CREATED, codes.ResourceExhausted},
		"destroyed":                       {v1alpha1.EventType_DESTROYED, v1alpha1.EventType_CREATED, codes.OK},
		"with an event that changes none": {v1alpha1.EventType_NOOP, v1alpha1.EventType_CREATED, codes.ResourceExhausted},
		"the last one":                    {v1alpha1.EventType_CREATED, v1alpha1.EventType_BOOTSTRAPPED, codes.OK},
	} {
		t.Run(name, func(t *testing.T) {
			b, now := newBounds(), time.Now()

			// Each in another minute, so that only the resources count.
			send := func(typ v1alpha1.EventType, id string) error {
				now = now.Add(time.Minute)

				return b.checkEvents([]*v1alpha1.Event{event(typ, id, 10<<10)}, now)
			}

			for i := range 9 {
				require.NoError(t, send(v1alpha1.EventType_CREATED, fmt.Sprint(i)))
			}

			require.NoError(t, send(c.before, "8"))

			err := send(c.last, "9")
			assert.Equal(t, c.want, status.Code(err), err)
		})
	}
}
