//go:build e2e && ha

package e2e_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/test/builder"
)

// TestHA_VersionsSideBySide rolls two machines back to an older version, and upgrades them again. Both versions lead, beside
// instances of the other one. During each reboot, a new Node registers and a kubelet requests a certificate.
func TestHA_VersionsSideBySide(t *testing.T) {
	addOlderExtension(t)

	s := begin(t)

	leader := s.leader()
	rest := others(leader)

	for i, m := range rest {
		s.upgrade(m, builder.OlderVersion, fmt.Sprintf("203.0.113.%d/32", 100+i))
	}

	require.Equal(t, leader, s.leader(), "the leader has changed")
	s.upgrade(leader, version, "203.0.113.110/32") // the reboot hands the lease over
	assert.NotEqual(t, leader, s.leader(), "the older version does not lead")
	s.status()

	for i, m := range rest {
		s.upgrade(m, version, fmt.Sprintf("203.0.113.%d/32", 120+i))
	}

	eventually(t, checkHealthy)
	s.status()
	s.end()
}

// addOlderExtension adds an extension with an older program, and with the specification of this version, to those that are
// built.
func addOlderExtension(t *testing.T) {
	t.Helper()

	path, err := builder.Older()
	require.NoError(t, err)

	dir := extensionDir(builder.OlderVersion)
	require.NoError(t, os.CopyFS(dir, os.DirFS(extensionDir(version))))

	program, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "rootfs/usr/local/lib/containers", extension.Name, extension.Name), program, 0o755))

	manifest := filepath.Join(dir, "manifest.yaml")
	text, err := os.ReadFile(manifest)
	require.NoError(t, err)

	number := func(version string) []byte { return []byte("version: " + strings.TrimPrefix(version, "v")) }
	require.NoError(t, os.WriteFile(manifest, bytes.Replace(text, number(version), number(builder.OlderVersion), 1), 0o644))
}
