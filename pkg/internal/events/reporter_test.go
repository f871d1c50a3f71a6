package events_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
)

func node(name string) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }

// recorded returns the Events since the last call.
func recorded(recorder *record.FakeRecorder) []string {
	var list []string

	for {
		select {
		case event := <-recorder.Events:
			list = append(list, event)
		default:
			return list
		}
	}
}

func TestReporter_EmitsEventsForNewConditions(t *testing.T) {
	var (
		pending     = events.Condition{Reason: "MetadataPending", Message: "waiting"}
		pendingMore = events.Condition{Reason: "MetadataPending", Message: "waiting for something else"}
		zone        = events.Condition{Reason: "OwnershipConflict", Subject: "zone", Message: "zone"}
		region      = events.Condition{Reason: "OwnershipConflict", Subject: "region", Message: "region"}
		invalid     = events.Condition{Reason: "InvalidValue", Subject: "zone", Message: "invalid"}
	)

	const (
		pendingEvent = "Warning MetadataPending waiting"
		zoneEvent    = "Warning OwnershipConflict zone"
		regionEvent  = "Warning OwnershipConflict region"
		invalidEvent = "Warning InvalidValue invalid"
	)

	for _, test := range []struct {
		name   string
		before func(*events.Reporter)
		now    []events.Condition
		want   []string
	}{
		{"no conditions", func(*events.Reporter) {}, nil, nil},
		{"new", func(*events.Reporter) {}, []events.Condition{pending}, []string{pendingEvent}},
		{"unchanged", func(r *events.Reporter) { r.Report("a", node("a"), pending) }, []events.Condition{pending}, nil},
		{"another message", func(r *events.Reporter) { r.Report("a", node("a"), pending) }, []events.Condition{pendingMore}, nil},
		{
			"reported again after it was resolved",
			func(r *events.Reporter) {
				r.Report("a", node("a"), pending)
				r.Report("a", node("a"))
			},
			[]events.Condition{pending},
			[]string{pendingEvent},
		},
		{
			"unchanged after another was resolved",
			func(r *events.Reporter) {
				r.Report("a", node("a"), pending, zone)
				r.Report("a", node("a"), pending)
			},
			[]events.Condition{pending},
			nil,
		},
		{"two subjects", func(*events.Reporter) {}, []events.Condition{zone, region}, []string{zoneEvent, regionEvent}},
		{"another subject", func(r *events.Reporter) { r.Report("a", node("a"), zone) }, []events.Condition{zone, region}, []string{regionEvent}},
		{"another reason with the same subject", func(r *events.Reporter) { r.Report("a", node("a"), zone) }, []events.Condition{zone, invalid}, []string{invalidEvent}},
		{"another object", func(r *events.Reporter) { r.Report("b", node("b"), pending) }, []events.Condition{pending}, []string{pendingEvent}},
		{
			"reported again after the object was forgotten",
			func(r *events.Reporter) {
				r.Report("a", node("a"), pending)
				r.Forget("a")
			},
			[]events.Condition{pending},
			[]string{pendingEvent},
		},
		{
			"unchanged after another object was forgotten",
			func(r *events.Reporter) {
				r.Report("a", node("a"), pending)
				r.Forget("b")
			},
			[]events.Condition{pending},
			nil,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			recorder := record.NewFakeRecorder(10)
			r := events.New(recorder)

			test.before(r)
			recorded(recorder)

			if added := r.Report("a", node("a"), test.now...); len(added) != len(test.want) {
				t.Errorf("added %v, want %d conditions", added, len(test.want))
			}

			if got := recorded(recorder); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestReporter_ConcurrentUse(t *testing.T) {
	const nodes, times = 20, 10

	recorder := record.NewFakeRecorder(nodes * times)
	r := events.New(recorder)

	var group sync.WaitGroup

	for i := range nodes {
		for range times {
			group.Go(func() {
				name := fmt.Sprintf("worker-%d", i)
				r.Report(name, node(name), events.Condition{Reason: "MetadataPending", Message: "waiting"})
			})
		}
	}

	group.Wait()

	if got := recorded(recorder); len(got) != nodes {
		t.Errorf("%d Events for %d objects", len(got), nodes)
	}
}
