// Package patches_test applies the patches of the documentation with Talos's own code.
package patches_test

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/docs"
)

const root = "../../.."

// TestPatches_AreAcceptedByEachRelease applies all patches to machine configurations of new clusters, and of clusters that
// were created with the oldest release.
func TestPatches_AreAcceptedByEachRelease(t *testing.T) {
	t.Parallel()

	patches, err := docs.Patches(root)
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(patches), 60)

	modules, err := filepath.Glob(root + "/packaging/image/talos/v*.mod")
	require.NoError(t, err)
	require.NotEmpty(t, modules)

	var releases []string

	for _, module := range modules {
		release := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(module), "v"), ".mod")
		releases = append(releases, release)

		t.Run(release, func(t *testing.T) {
			t.Parallel()

			program := filepath.Join(t.TempDir(), "patches")
			require.NoError(t, builder.Executable("./patches", program, "-C="+filepath.Dir(module), "-mod=readonly", "-modfile="+filepath.Base(module)))

			check(t, program, release, patches)
			check(t, program, "1.12", patches)
		})
	}

	for _, patch := range patches {
		assert.Subset(t, releases, patch.Created, patch.Position)
	}
}

// check applies patches to the machine configurations of a cluster that was created with a version of Talos.
func check(t *testing.T, program, created string, patches []docs.Patch) {
	t.Helper()

	for _, machine := range []string{"controlplane", "worker"} {
		var texts, positions []string

		for _, patch := range patches {
			if (patch.Created == nil || slices.Contains(patch.Created, created)) && (!patch.ControlPlane || machine == "controlplane") {
				texts, positions = append(texts, patch.Text), append(positions, patch.Position)
			}
		}

		input, err := json.Marshal(texts)
		require.NoError(t, err)

		cmd := exec.CommandContext(t.Context(), program, created, machine)
		cmd.Stdin = bytes.NewReader(input)

		output, err := cmd.Output()
		require.NoError(t, err)

		var problems []string
		require.NoError(t, json.Unmarshal(output, &problems))
		require.Len(t, problems, len(texts))

		for i, problem := range problems {
			assert.Empty(t, problem, "%s, %s of a cluster created with Talos %s", positions[i], machine, created)
		}
	}
}
