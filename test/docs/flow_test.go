package docs_test

import (
	"encoding/xml"
	"strings"
	"testing"
)

// TestFlow_IsAccessible checks that the picture has a title, a description and a dark mode, and that it is
// self-contained.
func TestFlow_IsAccessible(t *testing.T) {
	content := read(t, "docs/flow.svg")
	if err := xml.Unmarshal([]byte(content), &struct{}{}); err != nil {
		t.Error(err)
	}

	for text, wanted := range map[string]bool{
		"<svg ": true, "<title ": true, "<desc ": true, `role="img"`: true, `aria-labelledby="title desc"`: true,
		"prefers-color-scheme: dark": true, "href=": false, "onload=": false,
	} {
		if strings.Contains(content, text) != wanted {
			t.Errorf("docs/flow.svg contains %q: %t", text, !wanted)
		}
	}
}
