package docs_test

import (
	"bytes"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/test/docs"
)

// theirs are names of other programs.
var theirs = slices.Concat(
	[]string{"--arch", "--extra-kernel-arg", "--system-extension-image"},  // imager's
	[]string{"--cloud-provider", "--use-service-account-credentials"},     // the upstream Talos CCM's
	[]string{"--config-patch", "--config-patch-control-plane"},            // talosctl's
	[]string{"--cluster-signing-duration"},                                // kube-controller-manager's
	[]string{"--image-factory-address", "--primary-factory-url"},          // Omni's
	[]string{"--kubelet-insecure-tls"},                                    // metrics-server's
	[]string{"--privileged"},                                              // docker's
	[]string{"--take-ownership"},                                          // Helm's
	[]string{"CrashLoopBackOff", "ContainerCreating", "ImagePullBackOff"}, // the kubelet's
	[]string{"DaemonSet", "IfNotPresent"},                                 // Kubernetes's
	[]string{"ExtensionServiceConfig", "HostnameConfig", "LocalhostAdminKubeconfig", "NetworkDefaultActionConfig", "NetworkRuleConfig"},                    // Talos's
	[]string{"KubeControllerManagerConfig", "KubeNetworkConfig", "KubeNodeConfig", "KubeTalosAPIAccessConfig", "KubeletConfig", "UnattendedInstallConfig"}, // Talos's, since 1.14
	[]string{"DrainInProgress", "MaintenancePlanned"}, // Kubernetes'
	[]string{"NodeRestriction"},                       // the API server's
	[]string{"PrometheusRule", "ScrapeConfig"},        // the Prometheus operator's
	[]string{"cluster.local"},                         // a DNS domain
	[]string{"CACHE", "LOGS"},                         // the Makefile's, and that of tests
)

// pages returns all pages by name.
func pages(t *testing.T) map[string]string {
	t.Helper()

	sources, err := docs.Pages(root)
	require.NoError(t, err)

	texts := map[string]string{}
	for name, source := range sources {
		texts[name] = string(source)
	}

	return texts
}

func read(t *testing.T, name string) string {
	t.Helper()

	content, err := os.ReadFile(filepath.Join(root, name))
	require.NoError(t, err)

	return string(content)
}

// sources returns the content of the product's source files, and of all tests.
func sources(t *testing.T) (product, tests string) {
	t.Helper()

	for _, directory := range []string{"cmd", "extension", "pkg", "test"} {
		require.NoError(t, filepath.WalkDir(filepath.Join(root, directory), func(path string, _ os.DirEntry, err error) error {
			if err != nil || filepath.Ext(path) != ".go" {
				return err
			}

			content, err := os.ReadFile(path)

			if strings.HasSuffix(path, "_test.go") {
				tests += string(content)
			} else if !strings.Contains(path, "test/") {
				product += string(content)
			}

			return err
		}))
	}

	return product, tests
}

// TestNames_Exist checks names in the pages against the source, the help text and the manifests.
func TestNames_Exist(t *testing.T) {
	help, err := exec.CommandContext(t.Context(), built, "--help-all").Output()
	require.NoError(t, err)

	help = bytes.ReplaceAll(help, []byte("[=true|false]"), nil)

	source, tests := sources(t)

	for _, names := range []struct {
		what, pattern, known string
		// before and after surround a name in known.
		before, after string
	}{
		{"metric", `\b(talosccm_[a-z_]*[a-z])\b`, read(t, "test/monitoring/metrics.txt"), "", " "},
		{"metric of a library", "`((?:go|leader_election|process|rest_client|workqueue)_[a-z_]+)`", read(t, "test/monitoring/metrics.txt"), "", " "},
		{"alert", `\b(TalosCCM[A-Z]\w+)`, read(t, "docs/monitoring/alerts.yaml"), "alert: ", "\n"},
		{"reason or other word", "`((?:[A-Z][a-z0-9]+){2,})`", source + read(t, "docs/monitoring/alerts.yaml"), "", ""},
		{"reason", `\b(PodCIDR[A-Z]\w+)`, source, `"`, `"`},
		{"reason in a command", `reason=(\w+)`, source, `"`, `"`},
		{"flag", "`(--[a-z][a-z0-9-]+)", string(help), " ", ""},
		{"variable", "`TALOS_CCM_([A-Z0-9_]+)", strings.ToUpper(strings.ReplaceAll(string(help), "-", "_")), "__", " "},
		{"service", `\b(ext-[a-z-]+)`, "ext-" + extension.Name, "", ""},
		{"lease", `\b(cloud-controller-manager-[a-z]+)`, source, `"`, `"`},
		{"test", "`(Test\\w+)`", tests, "func ", "("},
		{"role", `\b(system:talos-ccm[a-z:-]*[a-z])`, string(extension.RBAC), "name: ", "\n"},
	} {
		pattern := regexp.MustCompile(names.pattern)
		found := 0

		for page, text := range pages(t) {
			for _, match := range pattern.FindAllStringSubmatch(text, -1) {
				found++

				if !slices.Contains(theirs, match[1]) && !strings.Contains(names.known, names.before+match[1]+names.after) {
					t.Errorf("%s: %s %s does not exist", page, names.what, match[1])
				}
			}
		}

		assert.NotEqual(t, 0, found, "no page has a %s", names.what)
	}
}

// TestPages_AreReachable checks that each page is reachable by links from the README.
func TestPages_AreReachable(t *testing.T) {
	texts := pages(t)
	link := regexp.MustCompile(`\]\(([\w./-]+\.md)`)
	reached := map[string]bool{}

	var follow func(page string)

	follow = func(page string) {
		if reached[page] {
			return
		}

		reached[page] = true

		for _, match := range link.FindAllStringSubmatch(texts[page], -1) {
			follow(path.Join(path.Dir(page), match[1]))
		}
	}

	follow("README.md")

	for page := range texts {
		assert.True(t, reached[page], "%s is not reachable from the README", page)
	}
}
