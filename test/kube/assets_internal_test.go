package kube

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Talos 1.13 sets flags that etcd 3.7 does not have.
func TestSource_LeavesEtcdToOtherVersionsOfKubernetes(t *testing.T) {
	for version, hasEtcd := range map[string]bool{KubernetesVersion: true, "v1.36.3": false} {
		module, err := source{directory: "components"}.moduleOf(version)
		require.NoError(t, err)
		assert.Contains(t, string(module), "k8s.io/kubernetes "+version+"\n")
		assert.Equal(t, hasEtcd, bytes.Contains(module, []byte("go.etcd.io/")), version)
	}
}
