package docs_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/extension"
)

func read(t *testing.T, name string) string {
	t.Helper()

	content, err := os.ReadFile(filepath.Join(root, name))
	require.NoError(t, err)

	return string(content)
}

// section returns the part of a page below a second-level heading.
func section(t *testing.T, page, heading string) string {
	t.Helper()

	_, text, found := strings.Cut(read(t, page), "\n## "+heading+"\n")
	require.True(t, found, "%s has no section %q", page, heading)

	text, _, _ = strings.Cut(text, "\n## ")

	return text
}

var codeSpan = regexp.MustCompile("`([^`]+)`")

// rows returns the cells of a section's tables, without the header rows.
func rows(t *testing.T, page, heading string) (list [][]string) {
	t.Helper()

	head := true

	for line := range strings.Lines(section(t, page, heading)) {
		line = strings.TrimSpace(line)

		switch {
		case !strings.HasPrefix(line, "|"):
			head = true
		case strings.HasPrefix(line, "|---"):
			head = false
		case !head:
			cells := strings.Split(strings.Trim(line, "|"), "|")
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}

			list = append(list, cells)
		}
	}

	require.NotEmpty(t, list, "%s has no table below %q", page, heading)

	return list
}

// codes returns the code spans of a cell.
func codes(cell string) (list []string) {
	for _, match := range codeSpan.FindAllStringSubmatch(cell, -1) {
		list = append(list, match[1])
	}

	return list
}

// names returns the code spans in the first column of a section's tables.
func names(t *testing.T, page, heading string) (list []string) {
	t.Helper()

	for _, cells := range rows(t, page, heading) {
		list = append(list, codes(cells[0])...)
	}

	return list
}

// exported returns the metrics in the list of test/monitoring, which compares it with a process: those of talos-ccm with
// type and labels, and the names of all.
func exported(t *testing.T) (ours, all []string) {
	t.Helper()

	for line := range strings.Lines(read(t, "test/monitoring/metrics.txt")) {
		fields := strings.Fields(line)
		for i := range fields {
			fields[i], _, _ = strings.Cut(fields[i], "=")
		}

		slices.Sort(fields[2:])
		all = append(all, fields[0])

		if strings.HasPrefix(fields[0], "talosccm_") {
			ours = append(ours, strings.Join(fields, " "))
		}
	}

	return ours, all
}

func TestMetrics_AreExported(t *testing.T) {
	want, all := exported(t)

	var got []string

	for _, cells := range rows(t, "docs/reference/metrics.md", "talos-ccm metrics") {
		labels := strings.FieldsFunc(cells[2], func(r rune) bool { return r == ',' || r == ' ' })
		slices.Sort(labels)

		got = append(got, strings.Join(append([]string{codes(cells[0])[0], cells[1]}, labels...), " "))
	}

	assert.ElementsMatch(t, want, got)
	assert.Subset(t, all, names(t, "docs/reference/metrics.md", "Framework metrics"))
}

var metricDefinition = regexp.MustCompile(`Name: +"(talosccm_[a-z_]+)"`)

// TestMetrics_AreDocumented also finds metrics that are defined but never exported.
func TestMetrics_AreDocumented(t *testing.T) {
	page := section(t, "docs/reference/metrics.md", "talos-ccm metrics")

	for _, source := range sources(t) {
		for _, match := range metricDefinition.FindAllStringSubmatch(source, -1) {
			assert.True(t, strings.Contains(page, "`"+match[1]+"`"), "%s is not in docs/reference/metrics.md", match[1])
		}
	}
}

var eventReason = regexp.MustCompile(`(?m)^\s+Reason\w+ += "(\w+)"$`)

// reasons returns the reasons of Events in the source.
func reasons(t *testing.T) (list []string) {
	t.Helper()

	for _, source := range sources(t) {
		for _, match := range eventReason.FindAllStringSubmatch(source, -1) {
			list = append(list, match[1])
		}
	}

	return list
}

func TestEvents_AreInSource(t *testing.T) {
	var got []string

	for _, heading := range []string{"Node Events", "CSR Events", "Service Events", "Pod CIDR Events"} {
		got = append(got, names(t, "docs/reference/events.md", heading)...)
	}

	assert.ElementsMatch(t, slices.Compact(slices.Sorted(slices.Values(reasons(t)))), slices.Compact(slices.Sorted(slices.Values(got))))
}

// sources returns the content of the product's source files.
func sources(t *testing.T) []string {
	t.Helper()

	return files(t, []string{"cmd", "extension", "pkg"}, func(path string) bool {
		return strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") && !strings.Contains(path, "/talostest/")
	})
}

// tests returns the content of all test files.
func tests(t *testing.T) []string {
	t.Helper()

	return files(t, []string{"cmd", "extension", "pkg", "test"}, func(path string) bool { return strings.HasSuffix(path, "_test.go") })
}

func files(t *testing.T, directories []string, match func(path string) bool) (list []string) {
	t.Helper()

	for _, directory := range directories {
		err := filepath.WalkDir(filepath.Join(root, directory), func(path string, entry os.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !match(path) {
				return err
			}

			content, err := os.ReadFile(path)
			list = append(list, string(content))

			return err
		})
		require.NoError(t, err)
	}

	return list
}

// logged matches log messages at verbosity 0.
var logged = regexp.MustCompile(`(?:logger|klog\.FromContext\(ctx\)|klog\.Background\(\)|outage\.\w+\(.*\))\.(?:Error\(\w+, |Info\()"([^"]+)"` +
	`|Failure: +"([^"]+)"|backoff\.Retry\(ctx, "([^"]+)"`)

var ourMetric = regexp.MustCompile(`\btalosccm_\w+`)

func TestTroubleshooting_IsComplete(t *testing.T) {
	var folder strings.Builder

	for name, text := range pages(t) {
		if strings.HasPrefix(name, "docs/troubleshooting/") {
			folder.WriteString(strings.Join(strings.Fields(text), " "))
		}
	}

	symptoms := slices.Concat(reasons(t), ourMetric.FindAllString(read(t, "docs/monitoring/alerts.yaml"), -1))

	for _, source := range sources(t) {
		for _, match := range logged.FindAllStringSubmatch(source, -1) {
			symptoms = append(symptoms, strings.Join(match[1:], ""))
		}
	}

	assert.GreaterOrEqual(t, len(symptoms), 100)

	for _, symptom := range symptoms {
		fine := []string{"Initialized", "CSRApproved"}
		if !strings.Contains(folder.String(), symptom) && !slices.Contains(fine, symptom) {
			t.Errorf("%q is not on a page in docs/troubleshooting", symptom)
		}
	}
}

// TestTroubleshooting_IndexHasSymptoms checks that the index has what people search for.
func TestTroubleshooting_IndexHasSymptoms(t *testing.T) {
	index := read(t, "docs/troubleshooting/README.md")

	for _, symptom := range []string{
		"NotReady", "<none>", "<pending>", "x509", "context deadline exceeded", "remote error: tls",
		"CrashLoopBackOff", "ImagePullBackOff", "metrics-server", "OOMKilled",
	} {
		assert.True(t, strings.Contains(index, symptom), "%q is not in the index", symptom)
	}
}

var runbook = regexp.MustCompile(`https://github\.com/talos-ccm/talos-ccm/blob/main/(docs/troubleshooting/\S+\.md)#(\S+)`)

// TestAlerts_LinkToRunbook checks that each runbook URL is a section of a troubleshooting page.
func TestAlerts_LinkToRunbook(t *testing.T) {
	alerts := read(t, "docs/monitoring/alerts.yaml")
	links := runbook.FindAllStringSubmatch(alerts, -1)
	assert.Len(t, links, strings.Count(alerts, "runbook_url: "))

	for _, link := range links {
		page := strings.ToLower(read(t, link[1]))
		assert.True(t, strings.Contains(page, "# "+strings.ReplaceAll(link[2], "-", " ")+"\n"), "runbook %s does not exist", link[0])
	}
}

func TestFlags_MatchHelp(t *testing.T) {
	help, err := exec.CommandContext(t.Context(), built, "--help-all").Output()
	require.NoError(t, err)

	help = bytes.ReplaceAll(help, []byte("[=true|false]"), nil)

	for _, cells := range rows(t, "docs/reference/flags.md", "Flags") {
		flag := codes(cells[0])[0]

		// A default can be some lines below its flag.
		text := regexp.MustCompile(`(?ms)^ {2,6}(?:-\w, )?` + flag + ` .*?(?:^ {2,6}(?:-\w, +)?--|^$)`).FindString(string(help))
		assert.NotEmpty(t, text, "%s does not exist", flag)

		if cells[1] == "in the service spec" {
			assert.Contains(t, string(extension.Spec), "    - "+flag)

			continue
		}

		for _, value := range codes(cells[1]) {
			assert.Contains(t, strings.Join(strings.Fields(strings.ReplaceAll(text, `"`, "")), " "), "(default "+value+")")
		}
	}
}
