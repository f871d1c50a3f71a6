package kube_test

import (
	"os"
	"os/exec"
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

func TestComponents_AreChosenByName(t *testing.T) {
	t.Setenv("KUBEBUILDER_ASSETS", "")

	directory, err := kube.AssetsOf(t.Context(), kube.KubernetesVersion, os.Stderr)
	require.NoError(t, err)

	multiCall := filepath.Join(directory, "kube-components")

	for _, component := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"} {
		want := "Kubernetes " + kube.KubernetesVersion + "\n"
		if component == "etcd" {
			want = "etcd Version: "
		}

		for how, cmd := range map[string]*exec.Cmd{
			"of a link":      exec.CommandContext(t.Context(), filepath.Join(directory, component), "--version"),
			"as an argument": exec.CommandContext(t.Context(), multiCall, component, "--version"),
			"in a container": {Path: multiCall, Args: []string{"/usr/local/bin/" + component, "--version"}},
		} {
			output, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s by its name %s", component, how)
			assert.Regexp(t, "^"+want, string(output), "%s by its name %s", component, how)
		}
	}

	for _, args := range [][]string{nil, {"kubectl"}} {
		output, err := exec.CommandContext(t.Context(), multiCall, args...).CombinedOutput()
		require.Error(t, err)
		assert.Regexp(t, "^usage: ", string(output))
	}
}
