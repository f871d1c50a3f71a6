package docs_test

import (
	"encoding/xml"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
)

// TestFlow_IsAccessible checks that the picture has a title, a description and a dark mode.
func TestFlow_IsAccessible(t *testing.T) {
	const picture = "docs/flow.svg"

	content := read(t, picture)
	decoder := xml.NewDecoder(strings.NewReader(content))

	var elements []string

	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}

		if err != nil {
			t.Fatal(err)
		}

		start, isStart := token.(xml.StartElement)
		if !isStart {
			continue
		}

		elements = append(elements, start.Name.Local)

		for _, attr := range start.Attr {
			if attr.Name.Local == "href" || attr.Name.Local == "onload" {
				t.Errorf("%s: %s has %s: the picture must be self-contained", picture, start.Name.Local, attr.Name.Local)
			}
		}
	}

	for _, wanted := range []string{"svg", "title", "desc"} {
		if !slices.Contains(elements, wanted) {
			t.Errorf("%s has no %s", picture, wanted)
		}
	}

	for _, wanted := range []string{`role="img"`, `aria-labelledby="title desc"`, "prefers-color-scheme: dark"} {
		if !strings.Contains(content, wanted) {
			t.Errorf("%s has no %s", picture, wanted)
		}
	}
}
