// Package events turns problems of objects into Events: one when a problem appears, and another one every
// 50 minutes while it holds and is reported.
package events

import (
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/record"
)

// MaxMessage is the largest message of an Event in bytes (validation of events.k8s.io).
const MaxMessage = 1024

// repeatAfter is shorter than the time after which the API server deletes an Event (--event-ttl).
const repeatAfter = 50 * time.Minute

// Problem is something that an operator should know about an object. It holds until a report no longer contains it.
type Problem struct {
	// Reason of the Event.
	Reason string `json:"reason"`
	// Subject distinguishes problems with the same reason, such as the label key; empty where there can be only one.
	Subject string `json:"-"`
	// Message of the Event. A problem whose message changes is not reported again.
	Message string `json:"message"`
}

// Reporter remembers the reported problems. It is safe for concurrent use. Use New.
type Reporter struct {
	recorder record.EventRecorder

	mu    sync.Mutex
	known map[string]map[Problem]time.Time // by object, without messages: when the last Event was emitted
}

// New returns a Reporter that has reported nothing.
func New(recorder record.EventRecorder) *Reporter {
	return &Reporter{recorder: recorder, known: map[string]map[Problem]time.Time{}}
}

// Report replaces the problems of the object with the given name, emits a Warning Event for each new problem and
// for each one without an Event for 50 minutes, and returns the new problems. Names must be unique within the Reporter.
func (r *Reporter) Report(name string, object runtime.Object, problems ...Problem) (added []Problem) {
	r.mu.Lock()

	before := r.known[name]
	delete(r.known, name)

	var repeated []Problem

	for _, c := range r.add(name, problems) {
		switch emitted, found := before[c.key()]; {
		case !found:
			added = append(added, c)
		case time.Since(emitted) >= repeatAfter:
			repeated = append(repeated, c)
		default:
			r.known[name][c.key()] = emitted
		}
	}

	r.mu.Unlock()

	for _, c := range slices.Concat(added, repeated) {
		r.recorder.Event(object, corev1.EventTypeWarning, c.Reason, Truncate(c.Message))
	}

	return added
}

// Add adds problems of the object to the earlier ones, and returns the new problems. It emits no Events.
func (r *Reporter) Add(name string, problems ...Problem) (added []Problem) {
	r.mu.Lock()
	defer r.mu.Unlock()

	return r.add(name, problems)
}

func (c Problem) key() Problem { return Problem{Reason: c.Reason, Subject: c.Subject} }

// add is Add. r.mu must be held.
func (r *Reporter) add(name string, problems []Problem) (added []Problem) {
	for _, c := range problems {
		if _, found := r.known[name][c.key()]; !found {
			if r.known[name] == nil {
				r.known[name] = map[Problem]time.Time{}
			}

			r.known[name][c.key()] = time.Now()
			added = append(added, c)
		}
	}

	return added
}

// Forget forgets the problems of an object that no longer exists.
func (r *Reporter) Forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	delete(r.known, name)
}

// CountByReason returns the number of objects with at least one problem of each reason.
func (r *Reporter) CountByReason() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()

	counts := map[string]int{}

	for _, problems := range r.known {
		reasons := sets.Set[string]{}
		for c := range problems {
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
