package docs_test

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/talos-ccm/talos-ccm/extension"
)

func TestFlags_MatchHelp(t *testing.T) {
	help, err := exec.CommandContext(t.Context(), built, "--help-all").Output()
	if err != nil {
		t.Fatal(err)
	}

	for _, cells := range rows(t, "docs/reference/flags.md", "Flags") {
		flag := codes(cells[0])[0]

		// A default can be some lines below its flag.
		text := regexp.MustCompile(`(?ms)^ +(?:-\w, )?` + flag + ` .*?(?:^ +(?:-\w, +)?--|^$)`).FindString(string(help))
		if text == "" {
			t.Errorf("%s does not exist", flag)

			continue
		}

		if cells[1] == "in the service spec" {
			if !strings.Contains(string(extension.Spec), "    - "+flag) {
				t.Errorf("%s is not in the service spec", flag)
			}

			continue
		}

		for _, value := range codes(cells[1]) {
			if !strings.Contains(strings.ReplaceAll(text, `"`, ""), "(default "+value+")") {
				t.Errorf("the default of %s is not %s: %s", flag, value, text)
			}
		}
	}
}
