// Package events turns conditions of objects into Events: one when a condition appears, none while it holds.
package events

import (
	"maps"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/record"
)

// MaxMessage is the largest message of an Event in bytes (validation of events.k8s.io).
const MaxMessage = 1024

// Condition is something that an operator should know about an object. It holds until a report no longer contains it.
type Condition struct {
	// Reason of the Event.
	Reason string
	// Subject distinguishes conditions with the same reason, such as the label key; empty where there can be only one.
	Subject string
	// Message of the Event. A condition whose message changes is not reported again.
	Message string
}

type id struct{ reason, subject string }

// Reporter remembers which conditions were reported. It is safe for concurrent use. Use New.
type Reporter struct {
	recorder record.EventRecorder

	mu    sync.Mutex
	known map[string]map[id]bool // by object
}

// New returns a Reporter that has reported nothing.
func New(recorder record.EventRecorder) *Reporter {
	return &Reporter{recorder: recorder, known: map[string]map[id]bool{}}
}

// Report replaces the conditions of the object with the given name, emits a Warning Event for each new one, and returns the new ones.
// Names must be unique within the Reporter.
func (r *Reporter) Report(name string, object runtime.Object, conditions ...Condition) (added []Condition) {
	added = r.Update(name, conditions...)

	for _, c := range added {
		r.recorder.Event(object, corev1.EventTypeWarning, c.Reason, Truncate(c.Message))
	}

	return added
}

// Update is Report without Events.
func (r *Reporter) Update(name string, conditions ...Condition) (added []Condition) {
	r.mu.Lock()
	defer r.mu.Unlock()

	return r.update(name, map[id]bool{}, conditions)
}

// Add is Update, but keeps the earlier conditions: a condition that returns is not new.
func (r *Reporter) Add(name string, conditions ...Condition) (added []Condition) {
	r.mu.Lock()
	defer r.mu.Unlock()

	now := maps.Clone(r.known[name])
	if now == nil {
		now = map[id]bool{}
	}

	return r.update(name, now, conditions)
}

// update replaces the conditions of the object with now and the given ones. r.mu must be held.
func (r *Reporter) update(name string, now map[id]bool, conditions []Condition) (added []Condition) {
	before := r.known[name]

	for _, c := range conditions {
		key := id{c.Reason, c.Subject}
		if !before[key] && !now[key] {
			added = append(added, c)
		}

		now[key] = true
	}

	if len(now) == 0 {
		delete(r.known, name)
	} else {
		r.known[name] = now
	}

	return added
}

// Forget drops what is known of an object that no longer exists.
func (r *Reporter) Forget(name string) { r.Update(name) }

// CountByReason returns the number of objects with at least one condition of each reason.
func (r *Reporter) CountByReason() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()

	counts := map[string]int{}

	for _, conditions := range r.known {
		reasons := map[string]bool{}
		for key := range conditions {
			reasons[key.reason] = true
		}

		for reason := range reasons {
			counts[reason]++
		}
	}

	return counts
}

// Truncate shortens a message to MaxMessage bytes without splitting a character.
func Truncate(message string) string {
	const ellipsis = "…"

	if len(message) <= MaxMessage {
		return message
	}

	return strings.ToValidUTF8(message[:MaxMessage-len(ellipsis)], "") + ellipsis
}
