package main

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// talos-ccm tells of a Node's pod CIDR too, sooner or later than of its metadata.
func TestObserver_PrefersPendingMetadataEvent(t *testing.T) {
	const other = "PodCIDRAllocatorUnknown"

	for _, reasons := range [][]string{{reasonPending, other}, {other, reasonPending}} {
		f := newFleet(1)
		o := newObserver(f)

		for _, reason := range reasons {
			o.seeEvent(&corev1.Event{
				Type: corev1.EventTypeWarning, Reason: reason, Message: "so it is",
				InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: f.members[0].name},
			})
		}

		if said := o.get(f.members[0].name).said; !strings.HasPrefix(said, reasonPending) {
			t.Errorf("after %v the message is: %s", reasons, said)
		}
	}
}
