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
	for _, test := range []struct {
		name                         string
		etcd, apiserver, controllers os.FileMode // 0 if the file does not exist
		missing                      string
	}{
		{"all that a control plane needs is enough", 0o755, 0o755, 0o755, ""},
		{"a missing component is named", 0o755, 0o755, 0, "kube-controller-manager"},
		{"a file that cannot be executed is missing", 0o644, 0o755, 0o755, "etcd"},
		{"an empty folder lacks everything", 0, 0, 0, "etcd, kube-apiserver, kube-controller-manager"},
	} {
		t.Run(test.name, func(t *testing.T) {
			folder := t.TempDir()
			t.Setenv("KUBEBUILDER_ASSETS", folder)

			for name, mode := range map[string]os.FileMode{"etcd": test.etcd, "kube-apiserver": test.apiserver, "kube-controller-manager": test.controllers} {
				if mode != 0 {
					require.NoError(t, os.WriteFile(filepath.Join(folder, name), nil, mode))
				}
			}

			got, err := kube.Assets(t.Context(), nil)
			if test.missing == "" {
				require.NoError(t, err)
				assert.Equal(t, folder, got)

				return
			}

			require.ErrorContains(t, err, "KUBEBUILDER_ASSETS="+folder+": not there, or not executable: "+test.missing+" ")

			_, err = kube.Start(t.Context(), kube.Options{})
			require.Error(t, err, "a control plane starts without components")
		})
	}
}

func TestComponents_AreChosenByName(t *testing.T) {
	t.Setenv("KUBEBUILDER_ASSETS", "")

	folder, err := kube.Assets(t.Context(), os.Stderr)
	require.NoError(t, err)

	multiCall := filepath.Join(folder, "kube-components")

	for _, component := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"} {
		want := "Kubernetes " + kube.KubernetesVersion + "\n"
		if component == "etcd" {
			want = "etcd Version: "
		}

		for how, cmd := range map[string]*exec.Cmd{
			"of a link":      exec.CommandContext(t.Context(), filepath.Join(folder, component), "--version"),
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
