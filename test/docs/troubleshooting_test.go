package docs_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// logged matches log messages at verbosity 0.
var logged = regexp.MustCompile(`(?:logger|klog\.FromContext\(ctx\)|klog\.Background\(\)|outage\.\w+\(.*\))\.(?:Error\(\w+, |Info\()"([^"]+)"` +
	`|Failure: +"([^"]+)"|backoff\.Retry\(ctx, "([^"]+)"`)

var ourMetric = regexp.MustCompile(`\btalosccm_\w+`)

// TestTroubleshooting_IsComplete checks that metrics with alerts and messages of the log are on a page. For the reasons of
// Events, the generated reference has causes and fixes.
func TestTroubleshooting_IsComplete(t *testing.T) {
	var folder strings.Builder

	for name, text := range pages(t) {
		if strings.HasPrefix(name, "docs/troubleshooting/") {
			folder.WriteString(strings.Join(strings.Fields(text), " "))
		}
	}

	symptoms := ourMetric.FindAllString(read(t, "docs/monitoring/alerts.yaml"), -1)

	product, _ := sources(t)
	for _, match := range logged.FindAllStringSubmatch(product, -1) {
		symptoms = append(symptoms, strings.Join(match[1:], ""))
	}

	assert.GreaterOrEqual(t, len(symptoms), 80)

	for _, symptom := range symptoms {
		assert.True(t, strings.Contains(folder.String(), symptom), "%q is not on a page in docs/troubleshooting", symptom)
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
