package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestGenerate_FilesAreUpToDate(t *testing.T) {
	generated, err := generate()
	require.NoError(t, err)

	for name, want := range generated {
		got, err := os.ReadFile(name)
		assert.NoError(t, err)
		assert.True(t, bytes.Equal(want, got), "%s is not up to date: run make generate", name)
	}
}
