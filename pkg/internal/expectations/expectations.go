// Package expectations remembers a controller's own writes until its cache shows them. A reconciliation of an older
// version would plan the same write again and conflict with the first one.
package expectations

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// Expectations are safe for concurrent use. Use New.
type Expectations struct {
	mu       sync.Mutex
	versions map[string]string // resourceVersion by name
}

// New returns Expectations that every object satisfies.
func New() *Expectations { return &Expectations{versions: map[string]string{}} }

// Expect records the version of the object that a write returned.
func (e *Expectations) Expect(written metav1.Object) {
	e.mu.Lock()
	defer e.mu.Unlock()

	e.versions[written.GetName()] = written.GetResourceVersion()
}

// Satisfied reports whether the cached object includes the last write. If it does not, a later version is on its way
// to the cache. Versions that cannot be compared satisfy the expectation.
func (e *Expectations) Satisfied(cached metav1.Object) bool {
	e.mu.Lock()
	defer e.mu.Unlock()

	order, err := resourceversion.CompareResourceVersion(cached.GetResourceVersion(), e.versions[cached.GetName()])

	return err != nil || order >= 0
}

// Forget drops the expectation for an object that no longer exists.
func (e *Expectations) Forget(name string) {
	e.mu.Lock()
	defer e.mu.Unlock()

	delete(e.versions, name)
}
