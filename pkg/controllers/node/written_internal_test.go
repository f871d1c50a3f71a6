package node

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestVersionsFromBeforeOurLastWriteAreOutdated(t *testing.T) {
	version := func(v string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-1", ResourceVersion: v}}
	}

	w := newWritten()
	if w.outdates(version("9")) {
		t.Error("a Node that we have never written is taken for outdated")
	}

	w.note(version("10"))

	for v, want := range map[string]bool{"9": true, "10": false, "11": false, "100": false, "": false, "strange": false} {
		if got := w.outdates(version(v)); got != want {
			t.Errorf("version %q: got %t, want %t", v, got, want)
		}
	}

	w.forget("worker-1")

	if w.outdates(version("9")) {
		t.Error("a Node that was forgotten is taken for outdated")
	}
}
