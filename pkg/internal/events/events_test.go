package events_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
)

var (
	mismatch    = events.Problem{Reason: "IdentityMismatch", Message: "Another machine answers"}
	labelA      = events.Problem{Reason: "OwnershipConflict", Subject: "a", Message: "Label a is owned by another field manager"}
	labelB      = events.Problem{Reason: "OwnershipConflict", Subject: "b", Message: "Label b is owned by another field manager"}
	invalidA    = events.Problem{Reason: "InvalidValue", Subject: "a", Message: "Label a is invalid"}
	unreachable = events.Problem{Reason: "MachineUnreachable", Message: "The machine does not respond"}
)

func TestReporter_ReportsEachProblemWhenItAppears(t *testing.T) {
	reworded := mismatch
	reworded.Message = "A third machine answers"

	for _, test := range []struct {
		name    string
		reports [][]events.Problem
		want    []events.Problem // new in the last report
	}{
		{"first report", [][]events.Problem{{mismatch, labelA}}, []events.Problem{mismatch, labelA}},
		{"unchanged", [][]events.Problem{{mismatch}, {mismatch}}, nil},
		{"message changed", [][]events.Problem{{mismatch}, {reworded}}, nil},
		{"same reason, another subject", [][]events.Problem{{labelA}, {labelA, labelB}}, []events.Problem{labelB}},
		{"two subjects", [][]events.Problem{{labelA, labelB}}, []events.Problem{labelA, labelB}},
		{"same subject, another reason", [][]events.Problem{{labelA}, {labelA, invalidA}}, []events.Problem{invalidA}},
		{"kept while another went", [][]events.Problem{{mismatch, labelA}, {mismatch}, {mismatch}}, nil},
		{"added to others", [][]events.Problem{{mismatch}, {unreachable, mismatch}}, []events.Problem{unreachable}},
		{"gone", [][]events.Problem{{mismatch, labelA}, {labelA}}, nil},
		{"back again", [][]events.Problem{{mismatch}, nil, {mismatch}}, []events.Problem{mismatch}},
		{"one of two back again", [][]events.Problem{{mismatch, labelA}, {labelA}, {mismatch, labelA}}, []events.Problem{mismatch}},
		{"twice in one report", [][]events.Problem{{mismatch, reworded}}, []events.Problem{mismatch}},
		{"none", [][]events.Problem{nil}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			recorder := record.NewFakeRecorder(10)
			reporter := events.New(recorder)

			last := len(test.reports) - 1
			for _, problems := range test.reports[:last] {
				reporter.Report("node", &corev1.Node{}, problems...)
			}

			drain(recorder)

			assert.Equal(t, test.want, reporter.Report("node", &corev1.Node{}, test.reports[last]...))

			var want []string
			for _, c := range test.want {
				want = append(want, "Warning "+c.Reason+" "+c.Message)
			}

			assert.Equal(t, want, drain(recorder))
		})
	}
}

// drain returns the Events emitted so far.
func drain(recorder *record.FakeRecorder) []string {
	var list []string

	for len(recorder.Events) > 0 {
		list = append(list, <-recorder.Events)
	}

	return list
}

// The API server deletes an Event after an hour.
func TestReporter_RepeatsEventsOfLastingProblems(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		recorder := record.NewFakeRecorder(10)
		reporter := events.New(recorder)

		for i, want := range [][]string{
			{"Warning IdentityMismatch Another machine answers"}, nil, {"Warning IdentityMismatch Another machine answers"}, nil,
		} {
			added := reporter.Report("node", &corev1.Node{}, mismatch)
			assert.Equal(t, i == 0, len(added) > 0, "a repetition is not a new problem")
			assert.Equal(t, want, drain(recorder), "report %d", i)
			time.Sleep(30 * time.Minute)
		}
	})
}

func TestReporter_KeepsObjectsApart(t *testing.T) {
	reporter := events.New(record.NewFakeRecorder(10))

	for _, name := range []string{"a", "b"} {
		assert.Len(t, reporter.Report(name, &corev1.Node{}, mismatch), 1, name)
	}

	reporter.Report("a", &corev1.Node{})
	reporter.Forget("a")

	assert.Empty(t, reporter.Report("b", &corev1.Node{}, mismatch))
}

func TestReporter_ForgetMakesProblemsNew(t *testing.T) {
	reporter := events.New(record.NewFakeRecorder(10))
	reporter.Report("node", &corev1.Node{}, mismatch)
	reporter.Forget("node")
	reporter.Forget("unknown")

	assert.Empty(t, reporter.CountByReason())

	assert.Len(t, reporter.Report("node", &corev1.Node{}, mismatch), 1)
}

func TestReporter_AddKeepsProblems(t *testing.T) {
	reporter := events.New(nil)

	for _, step := range []struct{ problems, want []events.Problem }{
		{[]events.Problem{mismatch}, []events.Problem{mismatch}},
		{nil, nil},
		{[]events.Problem{labelA, mismatch}, []events.Problem{labelA}},
		{[]events.Problem{mismatch}, nil},
	} {
		assert.Equal(t, step.want, reporter.Add("node", step.problems...), "%v", step.problems)
	}
}

func TestReporter_CountsObjectsByReason(t *testing.T) {
	reporter := events.New(record.NewFakeRecorder(10))
	if counts := reporter.CountByReason(); counts == nil || len(counts) != 0 {
		t.Errorf("without reports: %v", counts)
	}

	reporter.Report("a", &corev1.Node{}, labelA, labelB, mismatch)
	reporter.Report("b", &corev1.Node{}, labelA)
	reporter.Report("c", &corev1.Node{}, unreachable)
	reporter.Report("c", &corev1.Node{}, mismatch)

	assert.Equal(t, map[string]int{"OwnershipConflict": 2, "IdentityMismatch": 2}, reporter.CountByReason())
}

func TestReporter_ConcurrentUse(t *testing.T) {
	const objects, times = 20, 10

	var (
		recorder = record.NewFakeRecorder(objects * times)
		reporter = events.New(recorder)
		group    sync.WaitGroup
	)

	for i := range objects {
		for range times {
			group.Go(func() {
				reporter.Report(fmt.Sprint("node-", i), &corev1.Node{}, mismatch)
				reporter.CountByReason()
				reporter.Forget("other")
			})
		}
	}

	group.Wait()

	assert.Len(t, drain(recorder), objects)

	assert.Equal(t, objects, reporter.CountByReason()["IdentityMismatch"])
}

func TestReporter_TruncatesMessages(t *testing.T) {
	recorder := record.NewFakeRecorder(1)
	long := events.Problem{Reason: "MetadataPending", Message: strings.Repeat("x", 2000)}

	assert.Equal(t, []events.Problem{long}, events.New(recorder).Report("node", &corev1.Node{}, long))

	assert.Equal(t, "Warning MetadataPending "+events.Truncate(long.Message), <-recorder.Events)
}

func TestTruncate(t *testing.T) {
	for _, test := range []struct{ name, message, want string }{
		{"empty", "", ""},
		{"at the limit", strings.Repeat("x", events.MaxMessage), strings.Repeat("x", events.MaxMessage)},
		{"one byte over", strings.Repeat("x", events.MaxMessage+1), strings.Repeat("x", events.MaxMessage-3) + "…"},
		{"inside a character of two bytes", strings.Repeat("ä", events.MaxMessage), strings.Repeat("ä", 510) + "…"},
		{"inside a character of four bytes", "x" + strings.Repeat("😀", events.MaxMessage), "x" + strings.Repeat("😀", 255) + "…"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := events.Truncate(test.message)
			if got != test.want || len(got) > events.MaxMessage || !utf8.ValidString(got) {
				t.Errorf("got %d bytes %q, want %q", len(got), got, test.want)
			}
		})
	}
}
