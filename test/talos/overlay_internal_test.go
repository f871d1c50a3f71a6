package talos

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestOverlay_RequiresTextsExactlyOnce(t *testing.T) {
	for count, wantErr := range []string{"0 times; want once", "", "2 times; want once"} {
		talos, dir := t.TempDir(), t.TempDir()

		for _, edit := range edits {
			path := filepath.Join(talos, edit.file)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
			require.NoError(t, os.WriteFile(path, []byte(strings.Repeat(edit.old, count)), 0o644))
		}

		link, file, err := overlay(talos, dir)
		if wantErr != "" {
			require.ErrorContains(t, err, wantErr)

			continue
		}

		require.NoError(t, err)
		assert.FileExists(t, filepath.Join(link, edits[0].file))
		assert.FileExists(t, file)

		edited, err := os.ReadFile(filepath.Join(dir, "platform.go"))
		require.NoError(t, err)
		assert.Equal(t, edits[0].new, string(edited))
	}
}
