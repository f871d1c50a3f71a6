package kube

import (
	"bytes"
	"os"
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

// With other versions, packages of Kubernetes would be compiled twice, for talos-ccm and for the components.
func TestSource_HasVersionsOfProduct(t *testing.T) {
	product, err := os.ReadFile("../../go.mod")
	require.NoError(t, err)

	module, err := source{directory: "components"}.moduleOf(KubernetesVersion)
	require.NoError(t, err)

	versions := map[string]string{}
	for _, match := range requirement.FindAllStringSubmatch(string(module), -1) {
		versions[match[1]] = match[2]
	}

	for _, match := range requirement.FindAllStringSubmatch(string(product), -1) {
		if version := versions[match[1]]; version != "" {
			assert.Equal(t, match[2], version, match[1])
			delete(versions, match[1])
		}
	}

	assert.NotContains(t, versions, "google.golang.org/grpc", "compared")
}
