package claims

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func TestClaims_ForgetEverything(t *testing.T) {
	now := time.Now()
	c := New(func() time.Time { return now })

	for _, uid := range []types.UID{"1", "2", "3", "4"} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other", UID: uid}}
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}}

		c.SetMachine("other", machine.Machine{Nodename: "other", Endpoint: netip.MustParseAddr("10.0.0.2")})
		c.SetMachine("other", machine.Machine{Nodename: "other", Endpoint: netip.MustParseAddr("10.0.0.1")})
		c.SetNode(node)

		handlers := []func(){func() { c.DeleteNode(node) }, func() { c.SetMachine("other", machine.Machine{}) }}
		first := len(c.deleted) % 2
		handlers[first]()
		handlers[1-first]()
	}

	now = now.Add(Retention)
	last := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "last"}}
	c.SetNode(last)
	c.DeleteNode(last)

	assert.NotContains(t, c.machines, "other")
	assert.Empty(t, c.nodes)
	assert.Len(t, c.deleted, 1)
	assert.Equal(t, map[string][]*owner{"last": c.deleted}, c.owners)
}
