package expectations_test

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/internal/expectations"
)

func TestExpectations_SatisfiedByTheWrittenVersionAndLater(t *testing.T) {
	version := func(v string) metav1.Object { return &metav1.ObjectMeta{Name: "worker-1", ResourceVersion: v} }

	e := expectations.New()
	if !e.Satisfied(version("9")) {
		t.Error("an object that was never written does not satisfy")
	}

	e.Expect(version("10"))

	for v, want := range map[string]bool{"9": false, "10": true, "11": true, "100": true, "": true, "invalid": true} {
		if got := e.Satisfied(version(v)); got != want {
			t.Errorf("version %q: got %t, want %t", v, got, want)
		}
	}

	if !e.Satisfied(&metav1.ObjectMeta{Name: "worker-2", ResourceVersion: "9"}) {
		t.Error("an object of another name does not satisfy")
	}

	e.Forget("worker-1")

	if !e.Satisfied(version("9")) {
		t.Error("an object that was forgotten does not satisfy")
	}
}
