package kube_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

func TestAssets_AreFoundInEnvironment(t *testing.T) {
	directory := t.TempDir()
	t.Setenv("KUBEBUILDER_ASSETS", directory)

	for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager"} {
		_, err := kube.AssetsOf(t.Context(), kube.KubernetesVersion, nil)
		assert.ErrorContains(t, err, filepath.Join(directory, name)+": no such file or directory (unset KUBEBUILDER_ASSETS")

		require.NoError(t, os.WriteFile(filepath.Join(directory, name), nil, 0o600))

		_, err = kube.AssetsOf(t.Context(), kube.KubernetesVersion, nil)
		assert.ErrorContains(t, err, name+`": permission denied`)

		require.NoError(t, os.Chmod(filepath.Join(directory, name), 0o700))
	}

	got, err := kube.AssetsOf(t.Context(), kube.KubernetesVersion, nil)
	require.NoError(t, err)
	assert.Equal(t, directory, got)

	cluster := kube.Cluster{}
	_, err = cluster.StartKubelet(t.Context(), kube.KubeletSpec{NodeName: "a"})
	assert.ErrorContains(t, err, "start the kubelet of a: it must be this package's own")
}
