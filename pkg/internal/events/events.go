// Package events turns conditions of objects into Events: one when a condition appears, none while it holds.
package events

import (
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/record"
)

// MaxMessage is the largest message of an Event in bytes (validation of events.k8s.io).
const MaxMessage = 1024

// Condition is something that an operator should know about an object. It holds until a report no longer contains it.
type Condition struct {
	// Reason of the Event.
	Reason string `json:"reason"`
	// Subject distinguishes conditions with the same reason, such as the label key; empty where there can be only one.
	Subject string `json:"-"`
	// Message of the Event. A condition whose message changes is not reported again.
	Message string `json:"message"`
}

// Reporter remembers the reported conditions. It is safe for concurrent use. Use New.
type Reporter struct {
	recorder record.EventRecorder

	mu    sync.Mutex
	known map[string]sets.Set[Condition] // by object, without messages
}

// New returns a Reporter that has reported nothing.
func New(recorder record.EventRecorder) *Reporter {
	return &Reporter{recorder: recorder, known: map[string]sets.Set[Condition]{}}
}

// Report replaces the conditions of the object with the given name, emits a Warning Event for each new condition, and
// returns the new conditions. Names must be unique within the Reporter.
func (r *Reporter) Report(name string, object runtime.Object, conditions ...Condition) (added []Condition) {
	r.mu.Lock()

	before := r.known[name]
	delete(r.known, name)

	for _, c := range r.add(name, conditions) {
		if !before.Has(c.key()) {
			added = append(added, c)
		}
	}

	r.mu.Unlock()

	for _, c := range added {
		r.recorder.Event(object, corev1.EventTypeWarning, c.Reason, Truncate(c.Message))
	}

	return added
}

// Add adds conditions of the object to the earlier ones, and returns the new conditions. It emits no Events.
func (r *Reporter) Add(name string, conditions ...Condition) (added []Condition) {
	r.mu.Lock()
	defer r.mu.Unlock()

	return r.add(name, conditions)
}

func (c Condition) key() Condition { return Condition{Reason: c.Reason, Subject: c.Subject} }

// add is Add. r.mu must be held.
func (r *Reporter) add(name string, conditions []Condition) (added []Condition) {
	for _, c := range conditions {
		if !r.known[name].Has(c.key()) {
			if r.known[name] == nil {
				r.known[name] = sets.Set[Condition]{}
			}

			r.known[name].Insert(c.key())

			added = append(added, c)
		}
	}

	return added
}

// Forget forgets the conditions of an object that no longer exists.
func (r *Reporter) Forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	delete(r.known, name)
}

// CountByReason returns the number of objects with at least one condition of each reason.
func (r *Reporter) CountByReason() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()

	counts := map[string]int{}

	for _, conditions := range r.known {
		reasons := sets.Set[string]{}
		for c := range conditions {
			reasons.Insert(c.Reason)
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
