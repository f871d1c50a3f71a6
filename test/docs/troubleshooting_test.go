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

// normal are messages of normal operation, which need no action.
var normal = []string{
	"Allocating pod CIDRs", "API server endpoint or CA changed; recreating clients", "Applied configuration", "Approved CSR",
	"Assigned pod CIDRs", "Configuration needs further facts; starting controllers again", "Deleted node", "Initialized node",
	"Local machine is a control-plane machine; starting", "Local machine is not an active control-plane machine; idling",
	"Recorded client certificate of kubelet", "Recorded machine",
	"Started controller", "Starting talos-ccm", "Stated client certificate of kubelet", "Updated lifecycle taints",
	"Updated load balancer", "Updated node", "Waiting for the local machine to become a control-plane machine",
	"Watching local machine", "Watching machine",
}

// TestTroubleshooting_IsComplete checks that messages of the log are on a page, except the normal ones. For the reasons of
// Events, the generated reference has causes and fixes. Alerts link to a page.
func TestTroubleshooting_IsComplete(t *testing.T) {
	var folder strings.Builder

	for name, text := range pages(t) {
		if strings.HasPrefix(name, "docs/troubleshooting/") {
			folder.WriteString(strings.Join(strings.Fields(text), " "))
		}
	}

	product, _ := sources(t)
	messages := map[string]bool{}

	for _, match := range logged.FindAllStringSubmatch(product, -1) {
		messages[strings.Join(match[1:], "")] = true
	}

	assert.GreaterOrEqual(t, len(messages), 40)

	for _, message := range normal {
		assert.True(t, messages[message], "%q is not logged", message)
		delete(messages, message)
	}

	for message := range messages {
		assert.True(t, strings.Contains(folder.String(), message), "%q is not on a page in docs/troubleshooting", message)
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
