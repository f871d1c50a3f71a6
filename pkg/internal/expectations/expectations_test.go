package expectations_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/internal/expectations"
)

func TestExpectations_SatisfiedByTheWrittenVersionAndLater(t *testing.T) {
	version := func(v string) metav1.Object { return &metav1.ObjectMeta{Name: "worker-1", ResourceVersion: v} }

	e := expectations.New()
	assert.True(t, e.Satisfied(version("9")), "an object that was never written")

	e.Expect(version("10"))

	for v, want := range map[string]bool{"9": false, "10": true, "11": true, "100": true, "": true, "invalid": true} {
		assert.Equal(t, want, e.Satisfied(version(v)), "version %q", v)
	}

	assert.True(t, e.Satisfied(&metav1.ObjectMeta{Name: "worker-2", ResourceVersion: "9"}), "an object of another name")

	e.Forget("worker-1")
	assert.True(t, e.Satisfied(version("9")), "an object that was forgotten")
}
