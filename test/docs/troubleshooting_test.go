package docs_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// elsewhere maps messages of other programs to the program.
var elsewhere = map[string]string{
	"Unauthorized": "the API server's",
	"Waiting":      "a state of Talos's services",
	"admission webhook … denied the request":      "the API server's",
	"certificate is valid for …, not …":           "crypto/x509's",
	"certificate has expired or is not yet valid": "crypto/x509's",
	"certificate signed by unknown authority":     "crypto/x509's",
	"connection refused":                          "Linux's",
	"i/o timeout":                                 "package net's",
	"is forbidden":                                "the API server's",
	"tls: internal error":                         "crypto/tls's",
}

// headings returns the sections of the troubleshooting page.
func headings(t *testing.T) (list []string) {
	t.Helper()

	for line := range strings.Lines(read(t, "docs/troubleshooting.md")) {
		if heading, found := strings.CutPrefix(line, "## "); found {
			list = append(list, strings.TrimSpace(heading))
		}
	}

	return list
}

// symptoms returns the text of the items "Symptom" of a section of the troubleshooting page.
func symptoms(t *testing.T, heading string) (list []string) {
	t.Helper()

	for entry := range strings.SplitSeq(section(t, "docs/troubleshooting.md", heading), "\n### ") {
		_, text, found := strings.Cut(entry, "\n- **Symptom**: ")
		if !found {
			continue
		}

		text, rest, _ := strings.Cut(text, "\n- **Cause**: ")
		assert.Contains(t, rest, "\n- **Fix**: ", text)

		list = append(list, strings.Join(strings.Fields(text), " "))
	}

	assert.NotEmpty(t, list, "section %q has no symptom", heading)

	return list
}

var (
	command = regexp.MustCompile(`^(?:kubectl|make|talosctl) `)
	code    = regexp.MustCompile(`^[A-Z][A-Za-z]+$`)
	message = regexp.MustCompile(`^[^-]+ `)
)

// An operator searches the page for the message that the program prints.
func TestTroubleshooting_QuotesMessagesOfProgram(t *testing.T) {
	source := strings.ReplaceAll(strings.Join(sources(t), "\n"), `\"`, `"`)

	for _, heading := range headings(t) {
		for _, symptom := range symptoms(t, heading) {
			for _, text := range codes(symptom) {
				switch {
				case elsewhere[text] != "", command.MatchString(text):
				case code.MatchString(text):
					assert.True(t, strings.Contains(source, `"`+text+`"`), "%s: %q is not in the source", heading, text)
				case message.MatchString(text):
					for part := range strings.SplitSeq(text, "…") {
						assert.True(t, strings.Contains(source, strings.Trim(part, " :")), "%s: %q is not in the source", heading, part)
					}
				}
			}
		}
	}
}

// logged matches messages for operators: errors, and information with an error, at verbosity 0.
var logged = regexp.MustCompile(`(?:logger|klog\.FromContext\(ctx\)|klog\.Background\(\))\.(?:Error\(\w+, "([^"]+)"|Info\("([^"]+)", "err")|Failure: +"([^"]+)"`)

func TestTroubleshooting_HasAllMessages(t *testing.T) {
	page := read(t, "docs/troubleshooting.md")

	complaints := reasons(t)

	for _, source := range sources(t) {
		for _, match := range logged.FindAllStringSubmatch(source, -1) {
			complaints = append(complaints, strings.Join(match[1:], ""))
		}
	}

	assert.GreaterOrEqual(t, len(complaints), 30)

	for _, complaint := range complaints {
		fine := []string{"Initialized", "CSRApproved"}
		if !strings.Contains(page, complaint) && !slices.Contains(fine, complaint) {
			t.Errorf("%q is not on the page", complaint)
		}
	}
}

var runbook = regexp.MustCompile(`https://github\.com/talos-ccm/talos-ccm/blob/main/(docs/\S+\.md)#(\S+)`)

// TestAlerts_LinkToRunbook checks that each runbook URL is a section of the troubleshooting page.
func TestAlerts_LinkToRunbook(t *testing.T) {
	links := runbook.FindAllStringSubmatch(read(t, "docs/monitoring/alerts.yaml"), -1)
	assert.NotEmpty(t, links, "no alert has a runbook")

	page := strings.ToLower(read(t, "docs/troubleshooting.md"))

	for _, link := range links {
		assert.Equal(t, "docs/troubleshooting.md", link[1])
		assert.True(t, strings.Contains(page, "# "+strings.ReplaceAll(link[2], "-", " ")+"\n"), "runbook %s does not exist", link[0])
	}
}
