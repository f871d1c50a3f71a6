package docs_test

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/extension"
)

func TestFlags_MatchHelp(t *testing.T) {
	help, err := exec.CommandContext(t.Context(), built, "--help-all").Output()
	require.NoError(t, err)

	for _, cells := range rows(t, "docs/reference/flags.md", "Flags") {
		flag := codes(cells[0])[0]

		// A default can be some lines below its flag.
		text := regexp.MustCompile(`(?ms)^ +(?:-\w, )?` + flag + ` .*?(?:^ +(?:-\w, +)?--|^$)`).FindString(string(help))
		assert.NotEmpty(t, text, "%s does not exist", flag)

		if cells[1] == "in the service spec" {
			assert.Contains(t, string(extension.Spec), "    - "+flag)

			continue
		}

		for _, value := range codes(cells[1]) {
			assert.Contains(t, strings.ReplaceAll(text, `"`, ""), "(default "+value+")")
		}
	}
}
