package node

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
)

func named(name string) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }

// recorded are the Events since the last time.
func recorded(recorder *record.FakeRecorder) []string {
	var events []string

	for {
		select {
		case event := <-recorder.Events:
			events = append(events, event)
		default:
			return events
		}
	}
}

func TestAFindingIsReportedWhenItAppears(t *testing.T) {
	var (
		pending     = finding{reason: ReasonMetadataPending, message: "waiting"}
		pendingMore = finding{reason: ReasonMetadataPending, message: "waiting for something else"}
		zone        = finding{reason: ReasonOwnershipConflict, subject: keyZone, message: "zone"}
		region      = finding{reason: ReasonOwnershipConflict, subject: keyRegion, message: "region"}
		invalid     = finding{reason: ReasonInvalidValue, subject: keyZone, message: "invalid"}
	)

	const (
		pendingEvent = "Warning MetadataPending waiting"
		zoneEvent    = "Warning OwnershipConflict zone"
		regionEvent  = "Warning OwnershipConflict region"
		invalidEvent = "Warning InvalidValue invalid"
	)

	for _, test := range []struct {
		rule   string
		before func(*reporter)
		now    []finding
		want   []string
	}{
		{"nothing found, nothing said", func(*reporter) {}, nil, nil},
		{"once", func(*reporter) {}, []finding{pending}, []string{pendingEvent}},
		{"not again while it holds", func(r *reporter) { r.report(named("a"), []finding{pending}) }, []finding{pending}, nil},
		{"not even in other words", func(r *reporter) { r.report(named("a"), []finding{pending}) }, []finding{pendingMore}, nil},
		{
			"again after it was resolved",
			func(r *reporter) {
				r.report(named("a"), []finding{pending})
				r.report(named("a"), nil)
			},
			[]finding{pending},
			[]string{pendingEvent},
		},
		{
			"not again after something else was",
			func(r *reporter) {
				r.report(named("a"), []finding{pending, zone})
				r.report(named("a"), []finding{pending})
			},
			[]finding{pending},
			nil,
		},
		{"for every key", func(*reporter) {}, []finding{zone, region}, []string{zoneEvent, regionEvent}},
		{"for one more key, of that alone", func(r *reporter) { r.report(named("a"), []finding{zone}) }, []finding{zone, region}, []string{regionEvent}},
		{"for every reason of one key", func(r *reporter) { r.report(named("a"), []finding{zone}) }, []finding{zone, invalid}, []string{invalidEvent}},
		{"for every Node", func(r *reporter) { r.report(named("b"), []finding{pending}) }, []finding{pending}, []string{pendingEvent}},
		{
			"again for a Node that was gone",
			func(r *reporter) {
				r.report(named("a"), []finding{pending})
				r.forget("a")
			},
			[]finding{pending},
			[]string{pendingEvent},
		},
		{
			"not again because another Node is gone",
			func(r *reporter) {
				r.report(named("a"), []finding{pending})
				r.forget("b")
			},
			[]finding{pending},
			nil,
		},
	} {
		t.Run(test.rule, func(t *testing.T) {
			recorder := record.NewFakeRecorder(10)
			r := newReporter(recorder)

			test.before(r)
			recorded(recorder)
			r.report(named("a"), test.now)

			if got := recorded(recorder); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestManyNodesMayBeReportedAtOnce(t *testing.T) {
	const nodes, times = 20, 10

	recorder := record.NewFakeRecorder(nodes * times)
	r := newReporter(recorder)

	var group sync.WaitGroup

	for i := range nodes {
		for range times {
			group.Go(func() {
				r.report(named(fmt.Sprintf("worker-%d", i)), []finding{{reason: ReasonMetadataPending, message: "waiting"}})
			})
		}
	}

	group.Wait()

	if got := recorded(recorder); len(got) != nodes {
		t.Errorf("%d events for %d nodes", len(got), nodes)
	}
}
