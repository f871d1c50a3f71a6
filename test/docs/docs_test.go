package docs_test

import (
	"testing"

	"github.com/talos-ccm/talos-ccm/test/docs"
)

// root is the directory of the repository.
const root = "../.."

func TestDocuments(t *testing.T) {
	checker := docs.Checker{Root: root, Binary: built}
	if err := checker.Check(); err != nil {
		t.Fatal(err)
	}

	for _, problem := range checker.Problems {
		t.Error(problem)
	}

	t.Logf("%d links, %d blocks, %d commands", checker.Links, checker.Blocks, checker.Commands)
}
