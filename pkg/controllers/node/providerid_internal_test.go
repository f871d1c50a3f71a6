package node

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestDifferentInstances(t *testing.T) {
	const uuid, otherUUID = "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee", "11111111-2222-3333-4444-555555555555"

	for _, test := range []struct {
		name, a, b string
		want       bool
	}{
		{"same", "aws:///eu-1a/i-1", "aws:///eu-1a/i-1", false},
		{"two instances", "aws:///eu-1a/i-1", "aws:///eu-1a/i-2", true},
		{"two instances in two zones", "aws:///eu-1a/i-1", "aws:///eu-1b/i-2", true},
		{"numbers", "hcloud://1", "hcloud://2", true},
		{"same instance in upper case", "azure:///subscriptions/s/virtualMachines/VM-1", "azure:///subscriptions/S/virtualMachines/vm-1", false},
		{"other provider", "aws:///eu-1a/i-1", "hcloud://2", false},
		{"other form of one provider", "proxmox://1", "proxmox://region/2", false},
		{"UUIDs", "talos://metal/" + uuid, "talos://metal/" + otherUUID, true},
		{"upstream's or the other fallback", "talos://metal/10.0.0.1", "talos://metal/" + uuid, false},
		{"other fallback", "talos://metal/" + uuid, "talos://metal/10.0.0.1", false},
		{"changed address", "talos://metal/10.0.0.1", "talos://metal/10.0.0.2", false},
		{"changed IPv6 address", "talos://metal/fd00::1", "talos://metal/fd00::2", false},
		{"other platform", "talos://metal/" + uuid, "talos://nocloud/" + otherUUID, false},
		{"instance ID in place of a UUID", "talos://nocloud/" + uuid, "talos://nocloud/vm-1", false},
		{"not a URI", "a", "b", true},
	} {
		assert.Equal(t, test.want, differentInstances(test.a, test.b), test.name)
	}
}
