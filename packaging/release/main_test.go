package release_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// root is the folder of the repository.
const root = "../.."

func read(t *testing.T, path string) []byte {
	t.Helper()

	content, err := os.ReadFile(filepath.Join(root, path))
	require.NoError(t, err)

	return content
}
