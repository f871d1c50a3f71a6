package docs_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/docs"
)

// repository creates a repository with a Makefile, a page and another page for links.
func repository(t *testing.T, page string) string {
	t.Helper()

	directory := t.TempDir()

	for name, content := range map[string]string{
		"Makefile":            "ARCHES ?= amd64\nimage: ## Make it.\n\techo $(ARCHES) $(REF) $(REVISION)\n",
		"docs/page.md":        page,
		"docs/other.md":       "# Other things\n\n## What `it` is, twice\n\n## What `it` is, twice\n",
		"extension/rbac.yaml": "{}\n",
	} {
		file := filepath.Join(directory, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
	}

	return directory
}

func check(t *testing.T, page string) docs.Checker {
	t.Helper()

	checker := docs.Checker{Root: repository(t, page), Binary: built}
	require.NoError(t, checker.Check())

	return checker
}

// fenced returns a page with one block.
func fenced(info, content string) string { return "# Page\n\n```" + info + "\n" + content + "\n```\n" }

// service returns an ExtensionServiceConfig with a file and a variable.
func service(content, variable string) string {
	return "apiVersion: v1alpha1\nkind: ExtensionServiceConfig\nname: talos-ccm\nconfigFiles:\n" +
		"  - mountPath: /usr/local/etc/talos-ccm/config.yaml\n    content: |\n      " + content + "\nenvironment:\n  - " + variable
}

// pod returns a pod of talos-ccm.
func pod(arg string) string {
	return "apiVersion: v1\nkind: Pod\nspec: {containers: [{name: a, image: example.org/talos-ccm-pod:v1, args: [" + arg + "]}]}"
}

// TestChecker_ReportsProblems has pages with a mistake. TestDocuments covers pages without mistakes.
func TestChecker_ReportsProblems(t *testing.T) {
	t.Parallel()

	const rules = "global: {clusterName: a}"

	for _, test := range []struct{ mistake, page, problem string }{
		{"a link to a missing file", "[a](none.md)", "docs/page.md:1: stat docs/none.md: no such file"},
		{"a missing picture", "\n![a](flow.svg)", "docs/page.md:2: stat docs/flow.svg: no such file"},
		{"a link within a table", "| a |\n|---|\n| [b](none.md) |", "docs/page.md:3: stat docs/none.md"},
		{"a missing heading", "# Page\n[a](#pages)", "docs/page.md:2: link #pages: docs/page.md has no heading for #pages"},
		{"a missing heading of another page", "[a](other.md#thing)", "docs/other.md has no heading for #thing"},
		{"an anchor of a file that is not a page", "[a](../extension/rbac.yaml#a)", "extension/rbac.yaml has no heading for #a"},
		{"a link out of the repository", "[a](../../x.md)", "stat ../x.md: invalid argument"},
		{"an absolute link", "[a](/docs/other.md)", "is absolute"},
		{"a missing path", "See `extension/role.yaml`.", "stat extension/role.yaml: no such file"},
		{"an unknown variable", "Set `TALOS_CCM_VERBOSITY=4`.", "TALOS_CCM_VERBOSITY: no such flag"},
		{"an invalid value of a variable", "Set `TALOS_CCM_CONTROLLERS=*,-node-csr`.", `unknown controller "node-csr"`},
		{"an invalid value of a flag within text", "With `--secure-port=high`.", `invalid argument "high"`},
		{"a target within text", "Call `make images`.", "the Makefile has no target images"},

		{"a block without a language", fenced("", "a"), "docs/page.md:4: a block without a language"},
		{"an indented block", "a\n\n    b\n", "docs/page.md:3: a block without a language"},
		{"unknown language", fenced("cobol", "a"), "language cobol"},

		{"a typo in machine configuration", fenced("yaml", "machine:\n  kubelet:\n    extraArg: {}"), "unknown keys found during decoding"},
		{"a document that Talos rejects", fenced("yaml", "apiVersion: v1alpha1\nkind: ExtensionServiceConfig\nname: talos-ccm"), "no config files"},
		{"a mistake in the file within a document", fenced("yaml", service("lables: {}", "TALOS_CCM_V=4")), "lables: unknown key"},
		{"a file at the wrong place", fenced("yaml", strings.Replace(service(rules, "TALOS_CCM_V=4"), "config.yaml", "conf.yaml", 1)), "is not /usr/local/etc/talos-ccm/config.yaml"},
		{"an unknown variable in a document", fenced("yaml", service(rules, "TALOS_CCM_VERBOSITY=4")), "TALOS_CCM_VERBOSITY: no such flag"},
		{"a typo in a static pod", fenced("yaml", "machine:\n  pods:\n    - {apiVersion: v1, kind: Pod, spec: {container: []}}"), `unknown field "spec.container"`},
		{"an unknown flag of a pod's talos-ccm", fenced("yaml", pod("--cloud-conf=a")), "unknown flag: --cloud-conf"},
		{"a typo in an object", fenced("yaml", "apiVersion: v1\nkind: Service\nspec: {clusterIp: None}"), `unknown field "spec.clusterIp"`},
		{"unknown object", fenced("yaml", "apiVersion: example.com/v1\nkind: Thing"), `no kind "Thing" is registered`},
		{"the second of two documents", fenced("yaml", "apiVersion: v1\nkind: Service\n---\napiVersion: v1\nkind: Service\nspecs: {}"), `unknown field "specs"`},
		{"a typo in a configuration", fenced("yaml", "transformations: [{lables: {}}]"), "lables"},
		{"unknown document", fenced("yaml", "a: 1"), "a: unknown key"},
		{"invalid YAML", fenced("yaml", "a: [1"), "docs/page.md:4"},

		{"invalid shell syntax", fenced("sh", "echo 'a"), "without closing quote"},
		{"a placeholder in angle brackets", fenced("sh", "kubectl describe csr <name>"), "docs/page.md:4"},
		{"an unknown target", fenced("sh", "make image\nmake images"), "docs/page.md:5: the Makefile has no target images"},
		{"an unknown variable of make", fenced("sh", "make image REV=1"), "the Makefile does not use a variable REV"},
		{"an unknown flag of talos-ccm", fenced("sh", "talos-ccm --machine-sock=a"), "unknown flag: --machine-sock"},
		{"an unknown command of talos-ccm", fenced("sh", "talos-ccm check"), "unknown command talos-ccm check"},
		{"an unknown subcommand of talos-ccm", fenced("sh", "talos-ccm config check a"), "unknown command talos-ccm config check"},
		{"an unknown flag behind a pipe", fenced("sh", "echo a | talos-ccm config validate --all -"), "unknown flag: --all"},
		{"an unknown program", fenced("sh", "frobnicate"), "unknown command frobnicate"},
		{"a missing file", fenced("sh", "echo\nkubectl apply -f role.yaml"), "docs/page.md:5: file role.yaml exists neither"},
		{"a missing patch", fenced("sh", "talosctl patch machineconfig --patch @talos.yaml"), "file talos.yaml exists neither"},
		{"a missing path in a command", fenced("sh", "kubectl apply -f extension/role.yaml"), "stat extension/role.yaml: no such file"},
		{"a typo in a patch within a command", fenced("sh", `talosctl patch mc --patch '{"machine": {"kubelets": {}}}'`), "unknown keys found during decoding"},
		{"a typo in input of a command", fenced("sh", "talos-ccm config validate - <<'END'\nlables: {}\nEND"), "lables: unknown key"},
	} {
		t.Run(test.mistake, func(t *testing.T) {
			t.Parallel()

			checker := check(t, test.page)
			require.NotEmpty(t, checker.Problems)
			assert.Contains(t, checker.Problems[0], test.problem)
		})
	}
}
