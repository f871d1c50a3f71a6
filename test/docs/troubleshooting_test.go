package docs_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// elsewhere are messages that are not ours, and whose they are.
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
	"kubectl logs":                                "a command",
}

// headings are the sections of the page about troubleshooting that have a table.
func headings(t *testing.T) (list []string) {
	t.Helper()

	for line := range strings.Lines(read(t, "docs/troubleshooting.md")) {
		if heading, found := strings.CutPrefix(line, "## "); found {
			list = append(list, strings.TrimSpace(heading))
		}
	}

	return list
}

var (
	code    = regexp.MustCompile(`^[A-Z][A-Za-z]+$`)
	message = regexp.MustCompile(`^[^-]+ `)
)

// What somebody sees must be what the program says, or they will not find it on the page.
func TestMessagesOnThePageAreThoseOfTheProgram(t *testing.T) {
	source := strings.ReplaceAll(strings.Join(sources(t), "\n"), `\"`, `"`)

	for _, heading := range headings(t) {
		for _, cells := range rows(t, "docs/troubleshooting.md", heading) {
			for _, text := range codes(cells[0]) {
				switch {
				case elsewhere[text] != "":
				case code.MatchString(text):
					if !strings.Contains(source, `"`+text+`"`) {
						t.Errorf("%s: nothing says %q", heading, text)
					}
				case message.MatchString(text):
					for part := range strings.SplitSeq(text, "…") {
						if part = strings.Trim(part, " :"); !strings.Contains(source, part) {
							t.Errorf("%s: nothing says %q", heading, part)
						}
					}
				}
			}
		}
	}
}

// logged matches what is logged for operators: errors, and news that come with an error. What is below V(0) is not for them.
var logged = regexp.MustCompile(`(?:logger|klog\.FromContext\(ctx\)|klog\.Background\(\))\.(?:Error\(\w+, "([^"]+)"|Info\("([^"]+)", "err")|Failure: +"([^"]+)"`)

func TestWhateverTheProgramComplainsOfIsOnThePage(t *testing.T) {
	page := read(t, "docs/troubleshooting.md")

	complaints := reasons(t)

	for _, source := range sources(t) {
		for _, match := range logged.FindAllStringSubmatch(source, -1) {
			complaints = append(complaints, strings.Join(match[1:], ""))
		}
	}

	if len(complaints) < 30 {
		t.Errorf("found only %d messages in the source", len(complaints))
	}

	for _, complaint := range complaints {
		fine := []string{"Initialized", "CSRApproved"}
		if !strings.Contains(page, complaint) && !slices.Contains(fine, complaint) {
			t.Errorf("%q is not on the page", complaint)
		}
	}
}

var runbook = regexp.MustCompile(`https://github\.com/talos-ccm/talos-ccm/blob/main/(docs/\S+\.md)#(\S+)`)

// An alert's runbook is a link as any other.
func TestRunbooksOfAlertsAreThere(t *testing.T) {
	links := runbook.FindAllStringSubmatch(read(t, "docs/monitoring/alerts.yaml"), -1)
	if len(links) == 0 {
		t.Error("no alert has one")
	}

	for _, link := range links {
		if link[1] != "docs/troubleshooting.md" || !slices.ContainsFunc(headings(t), func(heading string) bool {
			return strings.ReplaceAll(strings.ToLower(heading), " ", "-") == link[2]
		}) {
			t.Errorf("%s leads nowhere", link[0])
		}
	}
}
