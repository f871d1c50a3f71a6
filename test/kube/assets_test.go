package kube_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

func TestAssets_FromEnvironment(t *testing.T) {
	for _, test := range []struct {
		name    string
		files   map[string]os.FileMode
		missing string
	}{
		{"all that a control plane needs is enough", map[string]os.FileMode{"etcd": 0o755, "kube-apiserver": 0o755, "kube-controller-manager": 0o755}, ""},
		{"a missing component is named", map[string]os.FileMode{"etcd": 0o755, "kube-apiserver": 0o755}, "kube-controller-manager"},
		{"a file that cannot be executed is missing", map[string]os.FileMode{"etcd": 0o644, "kube-apiserver": 0o755, "kube-controller-manager": 0o755}, "etcd"},
		{"an empty folder lacks everything", nil, "etcd, kube-apiserver, kube-controller-manager"},
	} {
		t.Run(test.name, func(t *testing.T) {
			folder := t.TempDir()
			t.Setenv("KUBEBUILDER_ASSETS", folder)

			for name, mode := range test.files {
				if err := os.WriteFile(filepath.Join(folder, name), nil, mode); err != nil {
					t.Fatal(err)
				}
			}

			got, err := kube.Assets(t.Context(), nil)
			if test.missing == "" {
				if err != nil || got != folder {
					t.Errorf("got %q, %v, want %q", got, err, folder)
				}

				return
			}

			want := "KUBEBUILDER_ASSETS=" + folder + ": not there, or not executable: " + test.missing + " "
			if err == nil || !strings.HasPrefix(err.Error(), want) {
				t.Errorf("got %v, want an error that begins with %q", err, want)
			}

			if _, err := kube.Start(t.Context(), kube.Options{}); err == nil {
				t.Error("a control plane starts without components")
			}
		})
	}
}

func TestComponents(t *testing.T) {
	t.Setenv("KUBEBUILDER_ASSETS", "")

	folder, err := kube.Assets(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}

	multiCall := filepath.Join(folder, "kube-components")

	for _, component := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"} {
		for how, cmd := range map[string]*exec.Cmd{
			"by the name of a link":      exec.CommandContext(t.Context(), filepath.Join(folder, component), "--version"),
			"by the first argument":      exec.CommandContext(t.Context(), multiCall, component, "--version"),
			"by the name in a container": {Path: multiCall, Args: []string{"/usr/local/bin/" + component, "--version"}},
		} {
			t.Run(component+" is chosen "+how, func(t *testing.T) {
				want := "Kubernetes " + kube.KubernetesVersion + "\n"
				if component == "etcd" {
					want = "etcd Version: "
				}

				if output, err := cmd.CombinedOutput(); err != nil || !strings.HasPrefix(string(output), want) {
					t.Errorf("got %q, %v, want %q", output, err, want)
				}
			})
		}
	}

	t.Run("no component is a usage error", func(t *testing.T) {
		for _, args := range [][]string{nil, {"kubectl"}} {
			output, err := exec.CommandContext(t.Context(), multiCall, args...).CombinedOutput()
			if err == nil || !strings.HasPrefix(string(output), "usage: ") {
				t.Errorf("kube-components %q: got %q, %v, want its usage", args, output, err)
			}
		}
	})
}
