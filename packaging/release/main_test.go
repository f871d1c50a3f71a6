// Package release_test tests the release process: the bldr files, the draft for the extensions catalog, the version
// numbers, the GitHub workflows and the commit check.
package release_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// root is the directory of the repository.
const root = "../.."

func read(t *testing.T, path string) []byte {
	t.Helper()

	content, err := os.ReadFile(filepath.Join(root, path))
	require.NoError(t, err)

	return content
}
