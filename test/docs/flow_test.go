package docs_test

import (
	"encoding/xml"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestFlow_IsAccessible checks that the picture has a title, a description and a dark mode, and that it is
// self-contained.
func TestFlow_IsAccessible(t *testing.T) {
	content := read(t, "docs/flow.svg")
	assert.NoError(t, xml.Unmarshal([]byte(content), &struct{}{}))

	for text, wanted := range map[string]bool{
		"<svg ": true, "<title ": true, "<desc ": true, `role="img"`: true, `aria-labelledby="title desc"`: true,
		"prefers-color-scheme: dark": true, "href=": false, "onload=": false,
	} {
		assert.Equal(t, wanted, strings.Contains(content, text), "docs/flow.svg contains %q: %t", text, !wanted)
	}
}
