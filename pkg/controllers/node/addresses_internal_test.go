package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
)

// The addresses of the Node have not followed the machine yet when the machine has its former addresses again.
func TestAddressWriters_IgnoreChangesOfMachine(t *testing.T) {
	writers := addressWriters{byNode: map[string]addressWriter{}}
	n := &corev1.Node{Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}}}}
	former, next := n.Status.Addresses, []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.2"}}

	for range 3 {
		assert.Empty(t, writers.observe(n, nil, time.Now()))
		assert.Empty(t, writers.observe(n, next, time.Now()))
		assert.Empty(t, writers.observe(n, former, time.Now()))
	}
}
