//go:build e2e

package talos_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

const nobody = 65534

// TestBed_RequiresRoot runs this binary as a user without rights: it must fail, and say why.
func TestBed_RequiresRoot(t *testing.T) {
	self, err := os.ReadFile(os.Args[0])
	require.NoError(t, err)

	dir := t.TempDir()
	copied := filepath.Join(dir, "bed.test")
	require.NoError(t, os.WriteFile(copied, self, 0o755))

	// Temporary folders are for their owner alone.
	for _, folder := range []string{dir, filepath.Dir(dir)} {
		require.NoError(t, os.Chmod(folder, 0o755))
	}

	cmd := exec.CommandContext(t.Context(), copied, "-test.run=^$")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}

	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	assert.Contains(t, string(out), talos.ErrNotRoot.Error())
}
