package docs_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/docs"
)

// root is the directory of the repository.
const root = "../.."

func TestDocuments(t *testing.T) {
	t.Parallel()

	checker := docs.Checker{Root: root, Binary: built}
	require.NoError(t, checker.Check())

	assert.Empty(t, checker.Problems)
	t.Logf("%d commands", checker.Commands)
}
